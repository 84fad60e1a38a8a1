"""Whether a folder holds an sdist and a wheel that an index takes, with the files that belong in them and no others.

python .ci/check_dist.py dist
"""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

PACKAGE = "lightning_gnn_dist"


def metadata_of(text: bytes, name: str) -> Metadata:
    """What an index would read, checked as it checks it."""
    found = Metadata.from_email(text, validate=True)
    assert found.name == PACKAGE.replace("_", "-"), f"{name}: the name is {found.name}"
    assert found.description and found.description_content_type == "text/markdown", f"{name}: no README"
    assert not re.search(r"\]\((?!https?:|#)", found.description), f"{name}: a link that an index cannot follow"
    assert found.summary and found.license_expression and found.requires_python, f"{name}: a field is missing"
    return found


def files_of_sdist(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        members = [member for member in archive if member.isfile()]
        return {member.name.partition("/")[2]: archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]


def check(folder: Path) -> None:
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    source = files_of_sdist(sdist)
    (told,) = [text for name, text in packed.items() if name.endswith(".dist-info/METADATA")]
    of_wheel, of_sdist = metadata_of(told, wheel.name), metadata_of(source["PKG-INFO"], sdist.name)
    assert of_wheel == of_sdist or of_wheel.as_rfc822().as_bytes() == of_sdist.as_rfc822().as_bytes(), "two metadata"
    extras = tomllib.loads(source["pyproject.toml"].decode())["project"]["optional-dependencies"]
    assert {*(of_wheel.provides_extra or ())} == {*extras}, "the wheel lacks an extra"
    ours = {name for name in packed if name.startswith(f"{PACKAGE}/")}
    assert f"{PACKAGE}/py.typed" in ours, "py.typed is missing"
    assert {name for name in source if name.startswith(f"{PACKAGE}/")} == ours, "sdist and wheel hold other modules"
    strays = [name for name in packed.keys() - ours if ".dist-info/" not in name]
    assert not strays, f"the wheel holds {strays}"
    assert any(name.endswith("/LICENSE") for name in packed) and "LICENSE" in source, "LICENSE is missing"
    print(f"{sdist.name} and {wheel.name}: {len(ours)} files of the package, version {of_wheel.version}")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
