"""Who may call what: the table against the services that there are, and names that bind."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from controlplane.core.access import (
    ANY,
    EVERYBODY,
    HTTP_POLICY,
    POLICY,
    Principal,
    Role,
    check_call,
    check_role,
    check_speaks_as,
    parse_identity,
)
from controlplane.core.errors import IdentityMismatch, PermissionDenied
from weightplane.local.v1 import member_pb2, rank_pb2
from weightplane.v1 import fleet_pb2, lifecycle_pb2, operator_pb2, rollout_pb2, weight_update_pb2

MODULES = (
    fleet_pb2,
    lifecycle_pb2,
    operator_pb2,
    rollout_pb2,
    weight_update_pb2,
    member_pb2,
    rank_pb2,
    health_pb2,
    reflection_pb2,
    channelz_pb2,
)
STATUS = "/weightplane.v1.Lifecycle/GetStatus"


DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
MARK = "<!-- written by tests/unit/test_access.py from the table in controlplane/core/access.py -->\n"

HTTP_MARK = "<!-- written by tests/unit/test_access.py from the routes in controlplane/core/access.py -->\n"


def methods(file: FileDescriptor) -> set[str]:
    return {f"/{s.full_name}/{m.name}" for s in file.services_by_name.values() for m in s.methods}


def test_every_rpc_of_every_service_is_in_the_table_and_nothing_else() -> None:
    assert set().union(*(methods(m.DESCRIPTOR) for m in MODULES)) == set(POLICY)


def test_every_module_that_has_a_service_is_looked_at() -> None:
    def generated(package: str) -> list[ModuleType]:
        made = (f.name for f in files(package).iterdir() if f.name.endswith("_pb2.py"))
        return [import_module(f"{package}.{name.removesuffix('.py')}") for name in made]

    every = [*generated("weightplane.v1"), *generated("weightplane.local.v1")]
    assert {m for m in every if m.DESCRIPTOR.services_by_name} <= set(MODULES)


def test_an_rpc_that_nobody_thought_of_is_nobodys() -> None:
    for role in Role:
        with pytest.raises(PermissionDenied, match="nobody may call it"):
            check_call(Principal(role), "/weightplane.v1.Fleet/Forgotten")


def test_only_admins_change_what_people_decided() -> None:
    for method in ("Rollback", "AcceptLedger", "KeepVersion", "ReleaseVersion"):
        assert POLICY[f"/weightplane.v1.Operator/{method}"] == {Role.ADMIN}


def test_only_trainers_and_the_coordinator_bring_weights() -> None:
    allowed = {Role.ADMIN, Role.TRAINER, Role.COORDINATOR}
    assert POLICY["/weightplane.v1.WeightUpdate/UpdateWeights"] == allowed


def test_a_viewer_changes_nothing() -> None:
    reads = {m for m, roles in POLICY.items() if Role.VIEWER in roles}
    verbs = ("Get", "Watch", "Plan", "Check", "List", "ServerReflectionInfo")
    assert all(m.rpartition("/")[2].startswith(verbs) for m in reads)


def test_a_refusal_says_the_role_wanted_and_the_role_had() -> None:
    with pytest.raises(PermissionDenied) as refused:
        check_call(Principal(Role.ROLLOUT, "loop-1"), STATUS)
    assert refused.value.metadata() == {
        "method": STATUS,
        "caller": "weightplane://*/rollout/loop-1",
        "wanted": "admin or coordinator or trainer or viewer",
        "had": "rollout",
    }


def test_an_identity_of_another_run_is_refused_and_of_any_run_is_not() -> None:
    check_call(Principal(Role.VIEWER, run_id="a"), STATUS, "a")
    check_call(Principal(Role.VIEWER), STATUS, "a")
    check_call(Principal(Role.VIEWER, run_id="b"), STATUS, "")
    with pytest.raises(PermissionDenied, match="wants the run a, the caller has the run b"):
        check_call(Principal(Role.VIEWER, run_id="b"), STATUS, "a")


def test_an_engine_speaks_as_itself_alone() -> None:
    check_speaks_as(Principal(Role.ENGINE, "e0"), Role.ENGINE, "e0")
    check_speaks_as(Principal(Role.ENGINE, ANY), Role.ENGINE, "e0")
    check_speaks_as(EVERYBODY, Role.ENGINE, "e0")
    for other in (Principal(Role.ENGINE, "e1"), Principal(Role.TRAINER, "e0"), Principal(Role.TRAINER)):
        with pytest.raises(IdentityMismatch, match="may not speak as engine e0"):
            check_speaks_as(other, Role.ENGINE, "e0")


def test_a_trainer_does_not_write_as_the_coordinator() -> None:
    check_role(Principal(Role.COORDINATOR), Role.COORDINATOR)
    with pytest.raises(IdentityMismatch, match="may not speak as coordinator"):
        check_role(Principal(Role.TRAINER), Role.COORDINATOR)
    with pytest.raises(IdentityMismatch):
        check_role(Principal(Role.COORDINATOR), Role.TRAINER)


@pytest.mark.parametrize("role", list(Role))
def test_an_identity_is_read_as_it_is_written(role: Role) -> None:
    for principal in (Principal(role), Principal(role, "a.b-c_1", "run-7")):
        assert parse_identity(str(principal)) == principal


@pytest.mark.parametrize(
    "text",
    [
        "",
        "weightplane://run/engine",
        "weightplane://run/engine/",
        "weightplane:///engine/a",
        "weightplane://run/king/a",
        "weightplane://run/engine/a/b",
        "weightplane://run/engine/a?role=admin",
        "weightplane://run/engine/a#admin",
        "weightplane://user@run/engine/a",
        "weightplane://run:80/engine/a",
        "weightplane://run/engine/a%2f",
        "weightplane://run/engine/" + "a" * 600,
        "https://run/engine/a",
        "weightplane://[run/engine/a",
    ],
)
def test_what_is_no_identity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_identity(text)


def table() -> str:
    """The policy as people read it."""
    rows = ["| RPC | may be called by |", "|---|---|"]
    for path, roles in POLICY.items():
        service, method = path.removeprefix("/").rpartition("/")[::2]
        rows.append(f"| `{service.rpartition('.')[2]}.{method}` | {_whose(roles)} |")
    return "\n".join(rows) + "\n"


def http_table() -> str:
    rows = ["| route | may be called by |", "|---|---|"]
    for route, roles in HTTP_POLICY.items():
        door, path = route.split()
        rows.append(f"| {door}: `{path}` | {_whose(roles)} |")
    return "\n".join(rows) + "\n"


def _whose(roles: frozenset[Role]) -> str:
    return "everybody with a role" if len(roles) == len(Role) else ", ".join(r.value for r in Role if r in roles)


def test_the_documents_table_is_the_one_that_is_kept() -> None:
    """WEIGHTPLANE_UPDATE_GOLDEN=1 writes it anew."""
    for mark, made in ((MARK, table()), (HTTP_MARK, http_table())):
        before, _, after = DOCUMENT.read_text().partition(mark)
        whole = before + mark + made.rstrip("\n") + after[after.index("\n\n") :]
        if os.environ.get("WEIGHTPLANE_UPDATE_GOLDEN"):
            DOCUMENT.write_text(whole)
        assert DOCUMENT.read_text() == whole


def test_every_role_is_told_of() -> None:
    assert all(f"| `{role.value}` |" in DOCUMENT.read_text() for role in Role)
