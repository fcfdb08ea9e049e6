"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        rounds: rounds of every request, summed: a batch of 3 adds 3.
        emitted: tokens those rounds accepted, bonus tokens included, before stopping cut them.
        steps: batches run.
        seconds: host time by phase. With ``split=True`` the device is waited for, so that it is the phase's own.
    """

    rounds: int = 0
    emitted: int = 0
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def accepted_per_round(self) -> float:
        """Tokens a round emits on average, the bonus token included."""
        return self.emitted / self.rounds if self.rounds else 0.0
