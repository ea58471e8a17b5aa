"""A registry of adapter versions that several servers (replicas) share: a directory, or an object store.

    base.json                        the registry's id, and the weights that its adapters are for; written once
    names/NAME/00000007.json         the manifest of revision 7 of NAME: what the name means, hashes of the files
    data/REPLICA/HASH-RANDOM/...     the files of one version, as `VersionStore` writes them; never changed
    replicas/REPLICA.json            what this replica serves, rewritten every few seconds
    unfinished/REPLICA/...           of a directory only: files that are being written

A manifest is the commit: it is created after all files of its version, under a name that must not exist. Of two
publishers of a name one therefore gets revision 7, and the other 8. The highest revision is what the name means; clocks
play no part in it.
"""

from kt_runtime.registry.place import Place, open_place
from kt_runtime.registry.records import Base, Heartbeat, Manifest, ServedRevision
from kt_runtime.registry.registry import Registry

__all__ = ["Base", "Heartbeat", "Manifest", "Place", "Registry", "ServedRevision", "open_place"]
