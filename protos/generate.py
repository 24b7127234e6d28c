"""Generate the Python of the protos beside them: `make protos`. With --check: fail if it is not up to date.

buf lints and formats; grpcio-tools generates, with mypy-protobuf's typed stubs.
"""

from __future__ import annotations

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
DOCUMENTED = Path("weightplane/v1/documented.binpb")


def generate(out: Path) -> None:
    files = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTOS)]
    command += [f"--{plugin}_out={out}" for plugin in ("python", "mypy")]
    with_services = [f for f in files if "\nservice " in (PROTOS / f).read_text()]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}  # where mypy-protobuf's plugins are
    _protoc([*command, *files], environment)
    _protoc([*command[:5], f"--grpc_python_out={out}", f"--mypy_grpc_out={out}", *with_services], environment)
    # The public contract with its comments, which generated Python drops: what reflection answers with.
    public = [f for f in files if f.startswith("weightplane/v1/")]
    described = ["--include_source_info", f"--descriptor_set_out={out / DOCUMENTED}"]
    _protoc([*command[:5], *described, *public], environment)


def _protoc(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)


def stale(out: Path) -> list[str]:
    made = {DOCUMENTED} | {p.relative_to(out) for p in out.rglob("*_pb2*")}
    kept = {p.relative_to(PROTOS) for p in PROTOS.rglob("*_pb2*.py*") if "__pycache__" not in p.parts}
    kept |= {DOCUMENTED} if (PROTOS / DOCUMENTED).exists() else set()
    differs = {p for p in made & kept if not filecmp.cmp(out / p, PROTOS / p, shallow=False)}
    return sorted(str(p) for p in (made ^ kept) | differs)


def main() -> int:
    if "--check" not in sys.argv[1:]:
        generate(PROTOS)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        old = stale(Path(scratch))
    if old:
        print("generated code is not up to date (run `make protos`):", *old, sep="\n  ", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
