"""Other programs that estimates can be of: what they keep that fsdpctl does not, a row each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """The facts about a program that an estimate depends on."""

    steps_at_once: bool = True  # AdamW in one kernel; else with a copy of the second moments
    keeps_logits: bool = False  # in float32, until the next pass has made its own
    # Inputs of recomputed blocks with frozen weights, and their gradients, until backward ends.
    keeps_inputs: bool = False
    plain_norms: bool = False  # of transformers' modules, which keep more tensors than torch's


OURS = "fsdpctl"
PROGRAMS = {
    OURS: ProgramFacts(),
    "torchtitan": ProgramFacts(keeps_logits=True),
    "transformers": ProgramFacts(plain_norms=True),
    "transformers_foreach": ProgramFacts(steps_at_once=False, plain_norms=True),
    "transformers_reentrant": ProgramFacts(keeps_inputs=True, plain_norms=True),
}
