"""Which table of embeddings ids go to, as they come in."""

from __future__ import annotations

from torch import fx

# what leaves ids as they are
_SAME = (
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "transpose", "permute", "slice",
    "select", "to", "_to_copy", "clone", "contiguous", "alias", "detach",
)  # fmt: skip
_TABLES = ("embedding", "embedding_bag", "_embedding_bag")


def tables_of(ids: fx.Node) -> list[str]:
    """Names of the weights that are looked up by this input."""
    found, waiting, seen = [], [ids], {ids}
    while waiting:
        node = waiting.pop()
        for user in node.users:
            kind = str(user.target).removeprefix("aten.").partition(".")[0]
            if kind in _TABLES and user.args[1] is node:
                table = user.args[0]
                if isinstance(table, fx.Node) and table.op == "get_attr":
                    found.append(str(table.target))
            elif kind in _SAME and user not in seen:
                seen.add(user)
                waiting.append(user)
    return found
