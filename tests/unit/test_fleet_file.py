"""Fleet files: what each process is given, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.cli.up.settings import checked, coordinator_of, engine_of, member_of
from controlplane.config import ConfigError, Text
from controlplane.fleet_file import engines_of, read_fleet_file

MEMORY = '[engine]\nbackend = "memory"\n'


def written(directory: Path, text: str, name: str = "fleet.toml") -> Path:
    file = directory / name
    file.write_text(text)
    return file


def settings(file: Path, *, gpu: bool = False) -> dict[str, dict[str, Any]]:
    return {e.engine_id: dict(e.settings) for e in engines_of(read_fleet_file(file), gpu=gpu)}


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        checked(file)
    assert str(file) in str(refused.value)
    return str(refused.value)


def test_each_engine_of_a_group_gets_its_own_devices_in_order(tmp_path: Path) -> None:
    group = '[[groups]]\nname = "p"\ncount = 2\ntensor_parallel_size = 2\ndevices = [4, 5, 6, 7]\n'
    file = written(tmp_path, MEMORY + group)
    assert {k: v["cpu_devices"] for k, v in settings(file).items()} == {"p-0": [4, 5], "p-1": [6, 7]}


def test_on_a_gpu_host_an_engine_is_let_see_only_its_devices(tmp_path: Path) -> None:
    file = written(tmp_path, '[vllm]\nmodel = "m"\n[[groups]]\nname = "p"\ndevices = ["GPU-a"]\n')
    engine = settings(file, gpu=True)["p-0"]
    assert engine["vllm"]["visible_devices"] == ["GPU-a"]
    assert "cpu_devices" not in engine


def test_a_groups_settings_go_over_the_files_and_arguments_of_vllm_are_joined(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        '[vllm]\nmodel = "m"\ndtype = "float32"\nvllm_arguments = {seed = 1, swap_space = 2}\n'
        '[[groups]]\nname = "p"\n[groups.vllm]\ndtype = "bfloat16"\nvllm_arguments = {seed = 7}\n',
    )
    vllm = settings(file)["p-0"]["vllm"]
    assert (vllm["dtype"], vllm["vllm_arguments"]) == ("bfloat16", {"seed": 7, "swap_space": 2})


def test_paths_start_from_the_files_directory(tmp_path: Path) -> None:
    text = 'checkpoint_root = "kept"\n[vllm]\nmodel = "models/m"\n[[groups]]\nname = "p"\n'
    file = written(tmp_path, text)
    engine = checked(file).engines[0]
    assert engine.vllm is not None
    assert engine.vllm.model == tmp_path / "models/m"
    assert engine.checkpoint_root == tmp_path / "kept"
    assert engine.state_dir == tmp_path / "weightplane-state/engines"
    assert coordinator_of(file, {}).state_dir == tmp_path / "weightplane-state/coordinator"


def test_a_frozen_group_serves_what_it_loads_and_a_pair_is_one_unit(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        MEMORY + '[[groups]]\nname = "t"\nmodel = "teacher"\nrole = "frozen"\n'
        '[[groups]]\nname = "pre"\nrole = "prefill"\npair = "pd"\n'
        '[[groups]]\nname = "dec"\nrole = "decode"\npair = "pd"\ncount = 2\n',
    )
    engines = {e.engine_id: e for e in checked(file).engines}
    assert engines["t-0"].initial == "serve"
    assert {(e.unit, e.unit_size) for k, e in engines.items() if k != "t-0"} == {("pd", 3)}


def test_a_groups_minimum_is_the_coordinators_to_keep(tmp_path: Path) -> None:
    file = written(tmp_path, MEMORY + '[[groups]]\nname = "p"\ncount = 3\nmin_engines = 2\n')
    assert coordinator_of(file, {}).min_engines == ("p=2",)


def test_the_command_line_goes_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, MEMORY + '[[groups]]\nname = "p"\n')
    assert engine_of(file, "p-0", {"listen": Text("127.0.0.1:5")}).listen == "127.0.0.1:5"


def test_an_engine_that_the_file_does_not_have_is_refused_with_the_nearest(tmp_path: Path) -> None:
    file = written(tmp_path, MEMORY + '[[groups]]\nname = "policy"\ncount = 2\n')
    with pytest.raises(ConfigError, match=r"did you mean policy-1\?"):
        engine_of(file, "polici-1", {})


SPANNING = """
run_id = "mine"
[engine.tls]
ca = "ca.pem"
cert = "engine.pem"
key = "engine.key"
[vllm]
model = "m"
[[groups]]
name = "wide"
vllm = { data_parallel_size = 2, further_nodes = 1, node_address = "10.0.0.1" }
[[groups]]
name = "p"
"""


def test_l7_a_member_is_of_its_engines_run_and_proves_it_as_that_one_does(tmp_path: Path) -> None:
    file = written(tmp_path, SPANNING)
    here = {"head": Text("10.0.0.1:7171"), "address": Text("10.0.0.2"), "model": Text("/m")}
    member = member_of(file, "wide-0", here)
    assert (member.run_id, member.engine_id, member.address) == ("mine", "wide-0", "10.0.0.2")
    assert member.model == Path("/m")
    assert member.tls == engine_of(file, "wide-0", {}).tls
    assert member.tls.cert == tmp_path / "engine.pem"


@pytest.mark.parametrize(
    ("engine_id", "said"),
    [("p-0", "vllm.further_nodes: the engine has no further nodes"), ("wide-1", "did you mean wide-0?")],
)
def test_a_member_of_an_engine_that_waits_for_none_is_refused(tmp_path: Path, engine_id: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        member_of(written(tmp_path, SPANNING), engine_id, {"head": Text("a:1"), "address": Text("b")})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grups = []", "did you mean groups?"),
        ('[[groups]]\nname = "p"\ncont = 2', "groups.0.cont: unknown key; did you mean count?"),
        ('[coordinator]\nupdate_mod = "rolling"', "did you mean update_mode?"),
        (MEMORY + 'grup = "x"\n[[groups]]\nname = "p"', "engine p-0: grup: unknown key; did you mean group?"),
        ('[[groups]]\nname = "p"\ndevices = [0, 1]', "1 engines of 1 need 1, not 2 devices"),
        ('[[groups]]\nname = "p"\ncount = 2\ndevices = [0, "GPU-a"]', "numbers or UUIDs, not both"),
        (
            '[[groups]]\nname = "p"\ndevices = [0]\n[[groups]]\nname = "q"\ndevices = [0]',
            "is given to p and to q",
        ),
        ('[[groups]]\nname = "p"\n[[groups]]\nname = "p"', "two groups have the name p"),
        ('[[groups]]\nname = "p"\nrole = "prefill"', "pair goes with the roles"),
        (
            '[[groups]]\nname = "p"\nrole = "prefill"\npair = "x"',
            "a group of role prefill and one of role decode",
        ),
        ('[[groups]]\nname = "p"\nmin_engines = 2', "min_engines is 2, and it has 1"),
        ('[[groups]]\nname = "../p"', "letters, digits, dots and dashes"),
        ('address = "127.0.0.1:0"', "needs a port"),
        ('[[groups]]\nname = "p"', "vllm.model: is required"),
    ],
)
def test_what_a_file_may_not_say_is_refused_with_the_key_and_both_values(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(written(tmp_path, text))


def test_the_example_is_a_fleet_file(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "deploy" / "fleet.toml"
    engines = [e.engine_id for e in checked(example).engines]
    assert engines == ["policy-0", "policy-1", "policy-2", "policy-3", "policy-long-0", "teacher-0"]


# ---- server groups ------------------------------------------------------------------------------

SERVER_GROUPS = """
vllm:
  - name: actor
    model_path: /models/a
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: prefill, num_gpus: 2}
      - {worker_type: placeholder, num_gpus: 3}
      - {worker_type: decode, num_gpus: 4, overrides: {seed: 3}}
  - name: reference
    model_path: /models/r
    update_weights: false
    engine_groups:
      - {num_gpus: 1}
"""


def test_server_groups_become_groups_with_devices_numbered_through(tmp_path: Path) -> None:
    found = settings(written(tmp_path, SERVER_GROUPS, "groups.yaml"))
    devices = {name: s["cpu_devices"] for name, s in found.items()}
    assert devices == {
        "actor-prefill-0-0": [0, 1],
        "actor-decode-2-0": [5, 6],
        "actor-decode-2-1": [7, 8],
        "reference-0": [9],
    }
    assert found["actor-decode-2-0"]["vllm"]["vllm_arguments"] == {"seed": 3}
    assert found["reference-0"]["initial"] == "serve"
    assert found["actor-prefill-0-0"]["unit_size"] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "expected a table"),
        ("vllm: [{name: a, model_path: m, server_groups: [{worker_type: encoder}]}]", "worker_type: expected one of"),
        (
            "vllm: [{name: a, model_path: m, server_groups: [{num_gpus: 3, num_gpus_per_engine: 2}]}]",
            "3 devices do",
        ),
        ("vllm: [{name: a, model_path: m, server_groups: [{num_gpu: 3}]}]", "did you mean num_gpus?"),
        (
            "vllm: [{name: a, model_path: m, update_weights: false, server_groups: "
            "[{worker_type: prefill}, {worker_type: decode}]}]",
            "a, group 0: prefill engines wait for a version of their pair, which update_weights: false never brings",
        ),
        ("vllm: [", "is not valid YAML"),
    ],
)
def test_server_groups_that_mean_nothing_here_are_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(written(tmp_path, text, "groups.yml"))
