"""How text, tables and pictures of the user's own are read. No torch here: `strata --help` reads this file."""

from __future__ import annotations

from dataclasses import dataclass, fields

from strata.core.errors import BadInput
from strata.core.paths import expanded
from strata.core.settings import check, setting, settings_of

TEXT, TABLE, PICTURES = "text", "a table", "your own pictures"


def _tokenizer(text: str) -> str:
    """A folder is found again where the run is resumed, wherever that is."""
    return text if text in ("bytes", "chars") else str(expanded(text).absolute())


@dataclass(frozen=True)
class Reading:
    """What `strata.data.load` is told beside a name; each is refused where it would not be looked at."""

    objective: str | None = setting(
        None,
        "classification, multi-label, regression, next-token, per-position or package.module:Class (default: the "
        "data's; a table has none)",
        metavar="NAME",
        since=2,
    )
    tokenizer: str | None = setting(
        None,
        "of text: bytes, chars, or the folder of a Hugging Face tokenizer (default: that of --model hf:FOLDER, else "
        "bytes; of shakespeare chars)",
        metavar="KIND",
        parse=_tokenizer,
        since=2,
    )
    length: int | None = setting(
        None,
        "of text: tokens of a sample; shorter ones are padded, longer ones cut, which is said (default: the longest, "
        "up to 512; of next-token 64, of shakespeare 80: there nothing is cut)",
        metavar="N",
        whole=True,
        least=1,
        since=2,
    )
    text_field: str = setting("text", "of text:FILE: the field that holds it", metavar="NAME", since=2)
    target: str = setting(
        "label", "of text:FILE and table:FILE: the field or column to predict", metavar="NAME", since=2
    )
    columns: tuple[str, ...] = setting(
        (), "of table:FILE: what the model sees (default: all other columns)", metavar="A,B", several=True, since=2
    )
    standardise: bool = setting(
        False, "of table:FILE: columns less their mean, by their deviation, both of the training rows", since=2
    )
    user_field: str | None = setting(
        None,
        "of text:FILE and table:FILE: the field or column that names whose a sample is, for --partition user",
        metavar="NAME",
        since=2,
    )
    test_share: float | None = setting(
        None,
        "of text:FILE and table:FILE without a field `split` (train, test): the share of rows to test on (default 0.1)",
        metavar="SHARE",
        above=0,
        below=1,
        since=2,
    )
    skip_unreadable: bool = setting(
        False, "of your own pictures: leave out files that cannot be read, and say which", since=2
    )

    def __post_init__(self) -> None:
        check(self)

    def refuse_unused(self, used: tuple[str, ...], name: str) -> None:
        """Says which of the settings that were given nothing would look at with this data."""
        known = settings_of(self)
        for one in fields(self):
            if one.name not in used and getattr(self, one.name) != one.default:
                raise BadInput(f"{known[one.name].option_of(one.name)} is not for the data {name}: leave it out")

    @property
    def share(self) -> float:
        return 0.1 if self.test_share is None else self.test_share


OF_TEXT_SETS = ("objective", "tokenizer", "length")
OF_TEXT = (*OF_TEXT_SETS, "text_field", "target", "user_field", "test_share")
OF_TABLES = ("objective", "target", "columns", "standardise", "user_field", "test_share")
OF_PICTURES = ("objective", "skip_unreadable")
OF_OTHERS = ("objective",)
