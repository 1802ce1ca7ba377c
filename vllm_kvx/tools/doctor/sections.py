"""All sections, in the order in which they run and are shown."""

from vllm_kvx.tools.doctor.findings import Section
from vllm_kvx.tools.doctor.flags import flags
from vllm_kvx.tools.doctor.installation import package, plugins
from vllm_kvx.tools.doctor.machine import gpu, ops, torch_package, vllm_package
from vllm_kvx.tools.doctor.measured import measured
from vllm_kvx.tools.doctor.model import model
from vllm_kvx.tools.doctor.plan import policy
from vllm_kvx.tools.doctor.surroundings import cache_folder, variables

# What imports torch or vLLM needs their sections: where they crash, nothing imports them again.
SECTIONS = (
    Section("package", package),
    Section("plugins", plugins),
    Section("variables", variables),
    Section("cache", cache_folder),
    Section("torch", torch_package),
    Section("vllm", vllm_package, ("torch",)),
    Section("gpu", gpu, ("torch",)),
    Section("ops", ops, ("torch", "vllm")),
    Section("model", model),
    Section("flags", flags, ("torch", "vllm", "device", "model")),
    Section("policy", policy),
    Section("measured", measured, ("model", "layers")),
)
