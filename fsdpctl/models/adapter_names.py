"""The names of adapters' parameters: in the model, and in the files of the PEFT library.

An adapter of a linear layer has two parameters in the model. The adapters of stacked experts have
two parameters for each matrix:

    layers.0.q_proj.lora_A.weight
    layers.0.experts.expert_adapters.gate_up_proj.lora_A.weight

PEFT's files have the prefix `base_model.model.`. PEFT nests the adapters of several matrices of the
same experts into one another, and so does not name the matrix:

    base_model.model.layers.0.q_proj.lora_A.weight
    base_model.model.layers.0.experts.base_layer.lora_A.weight
"""

from collections.abc import Collection, Iterable

LORA_A, LORA_B = "lora_A", "lora_B"  # the two layers of an adapter, B(A(x))
EXPERT_ADAPTERS = ".expert_adapters."  # between the name of experts and the name of their matrix
PEFT_PREFIX = "base_model.model."


def is_adapter_name(name: str) -> bool:
    return name.endswith((f".{LORA_A}.weight", f".{LORA_B}.weight"))


def adapted_layers(names: Iterable[str]) -> list[str]:
    """Return the sorted names of the layers that have an adapter, given parameter names."""
    suffix = f".{LORA_A}.weight"
    return sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))


def adapted_weight(layer: str) -> str:
    """Return the name of the weight that an adapter changes; `layer` is of `adapted_layers`."""
    return layer.replace(EXPERT_ADAPTERS, ".") if EXPERT_ADAPTERS in layer else f"{layer}.weight"


def peft_names(names: Collection[str]) -> dict[str, str]:
    """Return PEFT's name of each parameter by its name in the model.

    `names` are in the order of the module: if several matrices of the same experts have adapters,
    PEFT nests the first one innermost.
    """
    matrices: dict[str, list[str]] = {}  # names of adapted matrices by the name of their experts
    parts = {name: name.partition(EXPERT_ADAPTERS) for name in names}
    for prefix, separator, rest in parts.values():
        matrix = rest.partition(".")[0]
        if separator and matrix not in matrices.setdefault(prefix, []):
            matrices[prefix].append(matrix)
    renamed = {}
    for name, (prefix, separator, rest) in parts.items():
        if separator:
            matrix, _, suffix = rest.partition(".")
            depth = len(matrices[prefix]) - 1 - matrices[prefix].index(matrix)
            renamed[name] = f"{PEFT_PREFIX}{prefix}.{'base_layer.' * depth}{suffix}"
        else:
            renamed[name] = PEFT_PREFIX + name
    return renamed
