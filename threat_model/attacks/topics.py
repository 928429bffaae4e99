"""Guesses topic and language of chats from numbers of rows and from times, as Whisper Leak (arXiv 2511.03675) does from
the sizes of encrypted records, and arXiv 2412.15431 from numbers of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from threat_model.attacks.base import Outcome, score_guesses
from threat_model.evidence.chats import Step

Trace = Sequence[Step]
_FOLDS, _NEIGHBOURS = 8, 5


class TopicsOfChats:
    """Learns from chats whose labels it knows, and guesses the labels of the others. The executor may ask a model of
    its own the same kind of questions, so it has such chats."""

    name = "topics of chats"

    def run(self, traces: Sequence[Trace], labels: Tensor) -> Outcome:
        """Guess the label of each chat, int64 `[chats]`, as that of its nearest neighbours among the other parts."""
        x = torch.stack([_features(trace) for trace in traces])
        x = (x - x.mean(dim=0)) / x.std(dim=0).clamp(min=1e-9)
        part = torch.arange(len(x)) % _FOLDS
        distance = torch.cdist(x, x).masked_fill(part[:, None] == part, torch.inf)
        nearest = distance.topk(_NEIGHBOURS, largest=False)
        votes = torch.zeros(len(x), int(labels.max()) + 1, dtype=x.dtype)
        votes.scatter_add_(1, labels[nearest.indices], 1 / (0.1 + nearest.values))
        return score_guesses(votes.argmax(dim=1), labels)


def _features(trace: Trace) -> Tensor:
    """Return numbers of steps and rows, and times: of the whole, between steps, and inside steps."""
    rows = torch.tensor([step.rows for step in trace], dtype=torch.float64)
    begins = torch.tensor([step.begin for step in trace], dtype=torch.float64)
    inside = torch.tensor([step.end - step.begin for step in trace], dtype=torch.float64)
    gaps = begins.diff() if len(trace) > 1 else inside
    spans = [gaps.sum(), gaps.mean(), gaps.median(), gaps.std(correction=0)]
    spans += [inside.sum(), inside.mean(), inside.median()]
    counts = [rows.sum(), rows[0], rows.max(), torch.tensor(float(len(trace)))]
    return torch.stack([*(count.double().log1p() for count in counts), *((1e-6 + span).log() for span in spans)])


def uneven(traces: Sequence[Trace], *, bucket: int, rows: int) -> int:
    """Return the number of answers that are not what a bucket promises: rows of the prompt and passes in multiples of
    it, and `rows` rows in every pass after the prompt."""
    wrong = 0
    for trace in traces:
        counts = [step.rows for step in trace]
        reading = counts.index(rows) if rows in counts else len(counts)
        others = {*counts[reading:]} - {rows}
        wrong += bool(sum(counts[:reading]) % bucket or (1 + len(counts) - reading) % bucket or others)
    return wrong
