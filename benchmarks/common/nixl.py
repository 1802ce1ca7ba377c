"""What a router tells two servers between which NIXL hands a prompt over."""

from typing import Any

# Of both servers: ``--kv-transfer-config``.
NIXL: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
# The variable that names the port by which a server's own is found.
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
# ``kv_transfer_params`` of a request to the one that prefills, whose answer has the other's.
PREFILL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
