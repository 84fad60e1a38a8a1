"""The best links of many nodes, written to one file by all ranks: a row for each sender and receiver."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.extensions.links.best import Best
from lightning_gnn_dist.graph.user_ids import Ids, named
from lightning_gnn_dist.layers.shared_rows import SharedRows


@dataclass(frozen=True)
class LinkColumns:
    """The columns of a table of links, which has no receivers that are not there.

    Attributes:
        of_senders: The users' ids of all nodes that may send; None where nobody knows them.
        of_receivers: Those of all that may receive.
    """

    of_senders: Ids | None = None
    of_receivers: Ids | None = None

    def __call__(self, first: int, rows: Ids) -> dict[str, Ids]:
        rows = rows[rows["receiver"] >= 0]
        ends = named(rows["sender"], self.of_senders), named(rows["receiver"], self.of_receivers)
        return {"sender": ends[0], "receiver": ends[1], "score": rows["score"]}


@dataclass(frozen=True)
class QuestionColumns:
    """The columns of a table of what is recommended: a row for each question about a row that is there, and receiver.

    Attributes:
        questions: The rows of the task's table, in the order of what is recommended.
        senders: The node that each is about; -1 where its key names none.
        times: The time of each.
        of_senders: The users' ids of all nodes that may be asked about; None where nobody knows them.
        of_receivers: Those of all that may be recommended.
    """

    questions: Ids
    senders: Ids
    times: Ids
    of_senders: Ids | None = None
    of_receivers: Ids | None = None

    def __call__(self, first: int, rows: Ids) -> dict[str, Ids]:
        at, place = np.nonzero((rows["receiver"] >= 0) & (self.senders[first : first + len(rows)] >= 0)[:, None])
        found, at = rows[at, place], at + first
        ends = named(self.senders[at], self.of_senders), named(found["receiver"], self.of_receivers)
        of_questions = {"question": self.questions[at], "sender": ends[0], "time": self.times[at]}
        return of_questions | {"receiver": ends[1], "score": found["score"]}


class LinkFile:
    """Records ``sender``, ``receiver`` and ``score``: ``k`` rows for each sender, the best first.

    Where a sender has fewer receivers, the receivers of the last rows are -1. To construct it is collective.

    Args:
        path: The file.
        senders: The ids of the senders of all ranks.
        like: The best links of none of them.
        device: The device of the ranks' messages.
        columns: Names the nodes, if the file is a table.
    """

    def __init__(self, path: Path, senders: Tensor, like: Best, device: torch.device, columns: LinkColumns) -> None:
        self._senders, self._k, score = senders, like.ids.shape[1], like.scores.cpu().numpy().dtype
        self._row = np.dtype([("sender", np.int64), ("receiver", np.int64), ("score", score)])
        self._file = SharedRows(path, len(senders) * self._k, device, "best_links", columns)
        self._file.open(np.empty(0, self._row))

    def write(self, places: Tensor, best: Best) -> None:
        """Write the best links of some senders.

        Args:
            places: Where each sender stands among all.
            best: Their best links.
        """
        rows = np.empty((len(places), self._k), self._row)
        rows["sender"] = self._senders[places].numpy()[:, None]
        rows["receiver"], rows["score"] = best.ids.cpu().numpy(), best.scores.cpu().numpy()
        at = places.numpy()[:, None] * self._k + np.arange(self._k)
        self._file.write(at.reshape(-1), rows.reshape(-1))

    def publish(self) -> None:
        """Give the file its name when all ranks have written. Collective."""
        self._file.publish()

    def discard(self) -> None:
        """Delete a draft that was not published. Not collective."""
        self._file.discard()
