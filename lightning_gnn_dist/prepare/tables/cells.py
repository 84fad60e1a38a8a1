"""The SQL of the cells of a column."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE = {
    "TINYINT",
    "SMALLINT",
    "INTEGER",
    "BIGINT",
    "UTINYINT",
    "USMALLINT",
    "UINTEGER",
    "UBIGINT",
    "HUGEINT",
    "BOOLEAN",
}
REAL = {"FLOAT", "DOUBLE", '"NULL"'}  # the last of a column without a value
MOST_EXACT = (1 << 62) - 1


@dataclass(frozen=True)
class Cells:
    """The SQL of the cells of a column, as one kind or another: NULL where a cell is none of it.

    Args:
        name: The column, as SQL has it.
        type: Its type in DuckDB.
    """

    name: str
    type: str

    @property
    def is_list(self) -> bool:
        return self.type.endswith("]")

    @property
    def is_text(self) -> bool:
        return self.type == "VARCHAR"

    @property
    def is_real(self) -> bool:
        return self.type in REAL or self.type.startswith("DECIMAL")

    @property
    def is_date(self) -> bool:
        return self.type.startswith(("TIMESTAMP", "DATE"))

    @property
    def seconds(self) -> str:
        """A date as seconds since 1970, of UTC if a zone is told. A text that is one begins with a digit."""
        moment = f"CAST({self.name} AS TIMESTAMPTZ)" if self.is_date else "CAST(NULL AS TIMESTAMPTZ)"
        if self.is_text:
            whole = f"{self.name} || CASE length({self.name}) WHEN 4 THEN '-01-01' WHEN 7 THEN '-01' ELSE '' END"
            moment = f"CASE WHEN {self.name} BETWEEN '0' AND ':' THEN TRY_CAST({whole} AS TIMESTAMPTZ) END"
        return f"CAST(floor(epoch({moment})) AS BIGINT)"

    @property
    def word(self) -> str:
        return self.name if self.is_text else f"CAST({self.name} AS VARCHAR)"

    @property
    def value(self) -> str:
        """The word of a category: whole numbers without a fraction, whatever their type."""
        if self.type in WHOLE:
            return f"CAST(CAST({self.name} AS BIGINT) AS VARCHAR)"
        if not self.is_real:
            return self.word
        whole = f"CAST(TRY_CAST({self.name} AS BIGINT) AS VARCHAR)"
        return (
            f"CASE WHEN {self.number} % 1.0::DOUBLE = 0 THEN {whole} WHEN NOT isnan({self.number}) THEN {self.word} END"
        )

    @property
    def whole(self) -> str:
        if self.is_text:
            return f"CASE WHEN regexp_full_match({self.name}, '[+-]?[0-9]+') THEN TRY_CAST({self.name} AS BIGINT) END"
        return f"TRY_CAST({self.name} AS BIGINT)" if self.type in WHOLE else "CAST(NULL AS BIGINT)"

    @property
    def number(self) -> str:
        if self.is_text:  # 1_000 is a word
            return f"CASE WHEN contains({self.name}, '_') THEN NULL ELSE TRY_CAST({self.name} AS DOUBLE) END"
        return f"CAST({self.name} AS DOUBLE)" if self.type in WHOLE or self.is_real else "CAST(NULL AS DOUBLE)"

    @property
    def is_rounded(self) -> str:
        """Whether a whole number is one that float32 rounds."""
        whole = self.whole
        rounded = f"TRY_CAST(CAST({whole} AS FLOAT) AS BIGINT) IS DISTINCT FROM {whole}"
        return f"{rounded} OR coalesce({whole} NOT BETWEEN -{MOST_EXACT} AND {MOST_EXACT}, false)"

    @property
    def is_not_finite(self) -> str:
        """Whether a cell that is there holds other things than finite numbers of float32."""
        if self.is_list:
            finite = (
                f"list_bool_and(list_transform({self.name}, lambda e: coalesce(isfinite(TRY_CAST(e AS FLOAT)), false)))"
            )
        else:
            finite = f"isfinite(TRY_CAST({self.number} AS FLOAT))"
        return f"{self.name} IS NOT NULL AND NOT coalesce({finite}, false)"

    @property
    def written_whole(self) -> str:
        """Whether a text is a whole number as one is written: 007 and 1_000 are words."""
        return f"CAST(TRY_CAST({self.name} AS BIGINT) AS VARCHAR) = {self.name}"

    @property
    def look(self) -> tuple[str, str, str]:
        """What is asked of all cells of the column: how many there are, and how many of each kind; of lists lengths."""
        if self.is_list:
            return f"count({self.name})", f"min(len({self.name}))", f"max(len({self.name}))"
        return f"count({self.name})", f"count({self.whole})", f"count({self.number})"
