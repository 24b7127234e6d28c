"""Checkpoints: a version of a model in a directory that engines can read, whole and named by its content.

`ROOT/NAME/` holds safetensors files and `weightplane.json`, which says what they are: version, layout, and each
tensor's checksum. Trainer agents write them, engine agents read them; neither needs torch. Everything here blocks:
call it in a thread.

`manifest` is that file; `reading`, `writing` and `keeping` say what each of them promises. Other releases read it: its
format's version grows when an older reader could misunderstand it. Who keeps what and brings it where is not decided
here.
"""

from controlplane.checkpoints.keeping import identity, old_numbers, prefix_of, remove
from controlplane.checkpoints.manifest import MANIFEST_NAME, CheckpointManifest
from controlplane.checkpoints.reading import CheckpointFile, open_files, read_manifest
from controlplane.checkpoints.writing import SHARD_BYTES, CheckpointNotWritten, CheckpointWriter, write_checkpoint

__all__ = [
    "MANIFEST_NAME",
    "SHARD_BYTES",
    "CheckpointFile",
    "CheckpointManifest",
    "CheckpointNotWritten",
    "CheckpointWriter",
    "identity",
    "old_numbers",
    "open_files",
    "prefix_of",
    "read_manifest",
    "remove",
    "write_checkpoint",
]
