"""This server as a replica of a registry (`kt_runtime/registry`): its adapters become available on the other servers
of the registry, and theirs here."""
