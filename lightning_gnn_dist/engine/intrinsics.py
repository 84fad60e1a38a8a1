"""Machine instructions that numba does not offer: prefetch, copy, widen a float16, runs."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, cast

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

_FLAG, _INT, _SIZE = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_ADDRESS = ir.IntType(8).as_pointer()

LINE = 64  # bytes of a cache line

RUN = 32  # items that are compared or filled at once: one vector of bytes on most processors

# True on x86 since 2012 and on 64-bit ARM. Elsewhere the compiler would call a function that does not exist.
WIDENS_HALVES = platform.machine() in ("arm64", "aarch64") or binding.get_host_cpu_features().get("f16c", False)


def _prefetch(_: Any, array: Any, index: Any) -> Any:
    """Ask for ``array[index]`` to be brought into the cache. The index may be out of bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arguments = [_ADDRESS, _INT, _INT, _INT]
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", arguments[:1], ir.FunctionType(ir.VoidType(), arguments)
        )
        read, keep, data = _INT(0), _INT(3), _INT(1)
        builder.call(function, [_address(context, builder, signature.args, args, 0), read, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _copy_bytes(_: Any, target: Any, target_start: Any, source: Any, source_start: Any, count: Any) -> Any:
    """``target[target_start : target_start + count] = source[source_start : source_start + count]``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arguments = [_ADDRESS, _ADDRESS, _SIZE, _FLAG]
        function = builder.module.declare_intrinsic(
            "llvm.memcpy", arguments[:3], ir.FunctionType(ir.VoidType(), arguments)
        )
        to, origin = (_address(context, builder, signature.args, args, index) for index in (0, 2))
        builder.call(function, [to, origin, args[4], _FLAG(0)])
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.intp), generate


def _widened_half(_: Any, bits: Any) -> Any:
    """The float32 of a float16 that is given by its ``bits``. Only where ``WIDENS_HALVES``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


def _run_length(_: Any, array: Any, index: Any) -> Any:
    """How many items from ``array[index]`` on are equal, up to ``RUN``. Reads ``RUN`` integers in any case."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, items = _address_of_run(context, builder, signature.args, args)
        found = builder.load(builder.bitcast(address, items.as_pointer()), align=1)
        first = _repeated(builder, builder.extract_element(found, _INT(0)))
        differs = builder.bitcast(builder.icmp_unsigned("!=", found, first), ir.IntType(RUN))
        return builder.zext(builder.cttz(differs, _FLAG(0)), _SIZE)  # of no bits that are set it counts them all

    return types.int64(array, types.intp), generate


def _fill_run(_: Any, array: Any, index: Any, value: Any) -> Any:
    """``array[index : index + RUN] = value``, all of them in any case."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, items = _address_of_run(context, builder, signature.args, args)
        same = _repeated(builder, builder.trunc(args[2], items.element))
        builder.store(same, builder.bitcast(address, items.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), generate


def _address_of_run(context: Any, builder: Any, kinds: Any, args: Any) -> Any:
    """The address of the item ``args[1]`` of the array ``args[0]``, and the type of ``RUN`` of its items."""
    items = ir.VectorType(context.get_value_type(kinds[0].dtype), RUN)
    return _address(context, builder, kinds, args, 0), items


def _repeated(builder: Any, item: Any) -> Any:
    """A vector of ``RUN`` times the same item."""
    none = ir.Constant(ir.VectorType(item.type, RUN), ir.Undefined)
    first = builder.insert_element(none, item, _INT(0))
    return builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(_INT, RUN), [0] * RUN))


def _address(context: Any, builder: Any, kinds: Any, args: Any, index: int) -> Any:
    """The address of the item ``args[index + 1]`` of the array ``args[index]``."""
    array = context.make_array(kinds[index])(context, builder, args[index])
    return builder.bitcast(builder.gep(array.data, [args[index + 1]]), _ADDRESS)


prefetch = cast(Callable[..., None], intrinsic(_prefetch))
copy_bytes = cast(Callable[..., None], intrinsic(_copy_bytes))
widened_half = cast(Callable[..., Any], intrinsic(_widened_half))
run_length = cast(Callable[..., int], intrinsic(_run_length))
fill_run = cast(Callable[..., None], intrinsic(_fill_run))
