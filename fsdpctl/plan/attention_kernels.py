"""The attention kernels that can be selected, and what each of them supports."""

FLASH, FLASH3, FLASH4 = "flash", "flash3", "flash4"
CUDNN, EFFICIENT, MATH = "cudnn", "efficient", "math"
TRANSFORMERS = "transformers"  # no kernel: the attention code of the model's family
KERNELS = (FLASH, FLASH3, FLASH4, CUDNN, EFFICIENT, MATH)
AUTO_KERNELS = (FLASH, CUDNN)  # `auto` selects one of these for 2-byte dtypes
FLASH_KERNELS = (FLASH, FLASH3, FLASH4)  # run by torch's flash attention operator
CPU_KERNELS = (FLASH, MATH)
# These kernels do not support float32. Their query heads may share keys and values.
HALF_PRECISION_KERNELS = (*FLASH_KERNELS, CUDNN)
# Torch disables its cuDNN kernel under `use_deterministic_algorithms`. Others can be deterministic.
NONDETERMINISTIC_KERNELS = (CUDNN,)
KERNEL_PACKAGES = {FLASH3: "flash_attn_interface", FLASH4: "flash_attn.cute"}

# The fraction of a GPU's peak FLOP/s that long causal attention reaches, forward and backward,
# by `cluster.architecture`; docs/method/time-model.md has the sources.
PEAK_FRACTIONS = {
    "ampere": {FLASH: 0.61, CUDNN: 0.50, EFFICIENT: 0.31},
    "ada": {FLASH: 0.61, CUDNN: 0.61, EFFICIENT: 0.31},
    "hopper": {FLASH: 0.34, FLASH3: 0.63, FLASH4: 0.63, CUDNN: 0.545, EFFICIENT: 0.17},
    "blackwell": {FLASH: 0.18, FLASH4: 0.53, CUDNN: 0.34, EFFICIENT: 0.09},
}
ARCHITECTURES = tuple(PEAK_FRACTIONS)
