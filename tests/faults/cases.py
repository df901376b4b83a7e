"""The faults, and the moments at which they strike; a seed determines a case."""

import random
import signal
from dataclasses import dataclass, field

SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGQUIT")
PLANTED = ("NaN in the loss", "NaN in a gradient", "data error", "collective that never comes")
STEPS, SAVES_EVERY, VALIDATES_EVERY = 120, 25, 40
_MOMENTS = ("start-up", "first step", "training", "validation", "save", "last save")
_SHARES = {"signal": 120, "planted": 40, "damage": 16, "disk": 8, "cable": 8, "host": 8}


@dataclass(frozen=True, slots=True)
class Case:
    """A fault, and the settings of its run."""

    seed: int
    kind: str  # a key of _SHARES
    what: str  # a signal, what is planted, what is damaged
    target: str  # launcher, or a rank
    moment: str
    step: int  # for the moments that have one
    seconds: float  # of the delay in start-up, or without the cable
    restarts: int
    args: tuple[str, ...] = field(default=())

    @property
    def rank(self) -> int:
        """The rank that the fault strikes."""
        return int(self.target.removeprefix("rank ")) if self.target.startswith("rank") else 0

    @property
    def number(self) -> int:
        """The number of the signal."""
        return int(signal.Signals[self.what])

    @property
    def on_hosts(self) -> bool:
        """Whether the case needs two hosts."""
        return self.kind in ("cable", "host")

    @property
    def kills_launcher(self) -> bool:
        """Whether the fault kills a launcher."""
        return self.kind == "host" or (self.what, self.target) == ("SIGKILL", "launcher")

    @property
    def keeps_bits(self) -> bool:
        """Whether the policy promises the undisturbed run's weights in the end."""
        return not any("on_nonfinite" in arg for arg in self.args)


def case_of(seed: int) -> Case:
    """Return the case of a seed, the same one on every machine."""
    rng = random.Random(seed)
    kind = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
    target = rng.choice(("launcher", "rank 0", "rank 1"))
    what, moment, args = kind, rng.choice(_MOMENTS), list[str]()
    if kind == "signal":
        what = rng.choice(SIGNALS)
    elif kind == "planted":
        what, moment = rng.choice(PLANTED), "training"
        target = rng.choice(("rank 0", "rank 1"))
        if what.startswith("NaN"):
            policy = rng.choice(("stop", "skip"))
            args = [] if policy == "stop" else [f"train.on_nonfinite={policy}"]
    elif kind == "damage":
        what, moment = rng.choice(("newest checkpoint", "metrics", "other ranks")), "training"
    elif kind in ("disk", "host", "cable"):
        moment = "training"
    return Case(
        seed, kind, what, target, moment,
        step=rng.randrange(1, STEPS - 20),
        seconds=rng.uniform(1, 60) if kind == "cable" else rng.uniform(0, 6),
        restarts=rng.choice((0, 0, 2)),
        args=tuple(args),
    )  # fmt: skip
