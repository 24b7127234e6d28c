"""`weightplane doctor --config`: each thing that can be wrong with certificates and tokens is found before a start."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.cli.doctor import _daemons
from controlplane.cli.doctor_certificates import of_daemon, of_daemons, of_files
from controlplane.cli.doctor_checks import Check, Verdict
from controlplane.cli.doctor_config import Daemon, daemons_of
from controlplane.config import ConfigError
from controlplane.core.access import Principal, Role
from controlplane.rpc.security import TlsSettings
from controlplane.rpc.security.tokens import add_token, new_token
from tests.support.certificates import People, people

GOOD, NOTE, BAD = Verdict.GOOD, Verdict.NOTE, Verdict.BAD


@pytest.fixture
def issue(tmp_path: Path) -> People:
    return people(tmp_path)


def engine(tls: TlsSettings, at: str = "127.0.0.1:7171", run: str = "run-a") -> Daemon:
    return Daemon(Role.ENGINE, "engine-0", run, tls, at)


def worst(checks: list[Check], about: str) -> Check:
    """Of those whose name begins so."""
    order = [BAD, NOTE, GOOD]
    return min((c for c in checks if c.name.startswith(about)), key=lambda c: order.index(c.verdict))


def test_a_certificate_that_fits_is_good_in_every_respect(issue: People) -> None:
    whom = Principal(Role.ENGINE, "engine-0", "run-a")
    found = of_daemon(engine(issue.issued(whom, days=30)))
    assert {c.verdict for c in found} == {GOOD}
    assert {c.name.split(" of ")[0] for c in found} == {"tls.key", "certificate", "chain", "identity", "name"}


@pytest.mark.parametrize(
    ("node", "run", "verdict"),
    [
        ("engine", "*", GOOD),
        ("engine/engine-0", "*", GOOD),
        ("admin", "*", GOOD),
        ("engine/engine-1", "*", BAD),
        ("engine/engine-0", "run-b", BAD),
        ("trainer", "*", BAD),
    ],
)
def test_a_certificate_of_somebody_else_is_found_with_the_command_that_makes_the_right_one(
    issue: People, node: str, run: str, verdict: Verdict
) -> None:
    found = worst(of_daemon(engine(issue(node, run))), "identity")
    assert found.verdict is verdict
    assert verdict is GOOD or "certs dev DIR --node engine/engine-0 --run run-a" in found.advice


@pytest.mark.parametrize(
    ("days", "verdict", "words"), [(-1, BAD, "expired at"), (3, NOTE, "2 days"), (30, GOOD, "29 d")]
)
def test_an_expired_certificate_is_bad_and_one_that_runs_out_soon_is_noted(
    issue: People, days: float, verdict: Verdict, words: str
) -> None:
    found = worst(of_files("it", issue.issued(Principal(Role.ENGINE), days=days)), "certificate")
    assert (found.verdict, words in found.found) == (verdict, True)


def test_a_certificate_from_another_authority_is_distrusted(issue: People, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    foreign = people(tmp_path / "other")("engine")
    found = worst(of_files("it", replace(foreign, ca=issue.directory / "ca.pem")), "chain")
    assert (found.verdict, "authority" in found.advice) == (BAD, True)


def test_a_key_that_every_user_can_read_is_bad_and_one_of_a_group_is_noted(issue: People) -> None:
    tls = issue("engine")
    assert tls.key is not None
    for mode, verdict in ((0o644, BAD), (0o640, NOTE), (0o600, GOOD)):
        tls.key.chmod(mode)
        found = worst(of_files("it", tls), "tls.key")
        assert (found.verdict, found.advice) == (verdict, "" if verdict is GOOD else f"chmod 600 {tls.key}")


def test_files_that_are_missing_or_do_not_fit_are_findings_and_no_errors(issue: People, tmp_path: Path) -> None:
    tls, other = issue("engine"), issue("trainer")
    missing = worst(of_files("it", replace(tls, key=tmp_path / "no.key")), "tls.key")
    assert (missing.verdict, "No such file" in missing.found) == (BAD, True)
    mixed = worst(of_files("it", replace(tls, key=other.key)), "certificate")
    assert (mixed.verdict, "the key is not the certificate's" in mixed.found) == (BAD, True)


def test_an_address_that_is_not_among_the_names_is_noted(issue: People) -> None:
    tls = issue("engine")
    assert worst(of_daemon(engine(tls, "10.1.2.3:7171")), "name").advice.startswith("issue it for 10.1.2.3 too")
    assert worst(of_daemon(engine(tls, "[::1]:7171")), "name").verdict is GOOD
    assert worst(of_daemon(engine(tls, "0.0.0.0:7171")), "name").verdict is NOTE


def test_tokens_that_all_expired_or_that_others_can_write_are_bad(tmp_path: Path) -> None:
    file, now = tmp_path / "tokens.toml", datetime.datetime.now(datetime.UTC)
    tls = TlsSettings(tokens=file)
    assert worst(of_files("it", tls), "tls.tokens").verdict is BAD
    add_token(file, Principal(Role.VIEWER, "a"), new_token(), now - datetime.timedelta(days=1))
    assert "nobody is let in" in worst(of_files("it", tls), "tls.tokens").found
    add_token(file, Principal(Role.VIEWER, "b"), new_token())
    assert worst(of_files("it", tls), "tls.tokens").found.endswith("2 tokens, 1 of them expired")
    file.chmod(0o666)
    assert "write themselves a token" in worst(of_files("it", tls), "tls.tokens").found


def test_the_tokens_of_a_page_or_a_door_are_looked_at_too(tmp_path: Path) -> None:
    text = 'run_id = "r"\nweb_listen = "127.0.0.1:0"\nweb_tokens = "web.toml"'
    (found,) = daemons_of(write(tmp_path / "coordinator.toml", text))
    assert worst(of_daemon(found), "HTTP tokens").verdict is BAD
    add_token(tmp_path / "web.toml", Principal(Role.VIEWER, "ann"), new_token())
    assert worst(of_daemon(found), "HTTP tokens").verdict is GOOD


def test_nothing_that_is_shown_holds_a_token_or_a_key(issue: People, tmp_path: Path) -> None:
    token, tls = new_token(), issue("engine")
    (tmp_path / "my.token").write_text(f"{token}\n{token}")
    found = of_files("it", replace(tls, token=tmp_path / "my.token"))
    assert worst(found, "tls.token").verdict is BAD
    assert token not in repr(found)
    assert "PRIVATE" not in repr(found)


def test_engines_that_share_files_are_told_once_but_for_what_is_wrong_with_each(issue: People) -> None:
    tls = issue("engine/engine-0")
    both = [engine(tls), Daemon(Role.ENGINE, "engine-1", "run-a", tls, "127.0.0.1:1")]
    found = of_daemons(both)
    assert [c.name for c in found if "engine-1" in c.name] == ["identity of engine-1"]
    assert of_daemons([engine(TlsSettings())])[0].verdict is NOTE


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_whose_file_it_is_follows_from_its_keys(tmp_path: Path) -> None:
    made = {
        "engine.toml": ('engine_id = "engine-7"\nrun_id = "r"', (Role.ENGINE, "engine-7", "r")),
        "trainer.toml": ('coordinator = "127.0.0.1:1"\ntrainer_id = "t"', (Role.TRAINER, "t", "")),
        "coordinator.toml": ('run_id = "r"', (Role.COORDINATOR, "", "r")),
    }
    for name, (text, wanted) in made.items():
        (found,) = daemons_of(write(tmp_path / name, text))
        assert (found.role, found.name, found.run_id) == wanted
    fleet = 'run_id = "r"\n[[groups]]\nname = "policy"\ncount = 2\n[engine]\nbackend = "memory"\n'
    assert [str(d) for d in daemons_of(write(tmp_path / "fleet.toml", fleet))] == [
        "coordinator",
        "policy-0",
        "policy-1",
    ]


def test_settings_that_a_daemon_would_refuse_are_refused_in_its_words(tmp_path: Path) -> None:
    wrong = write(tmp_path / "engine.toml", 'engine_id = "e"\nlisten = "0.0.0.0:1"')
    with pytest.raises(ConfigError, match="other hosts reach"):
        daemons_of(wrong)
    daemons, (found,) = _daemons(wrong)
    assert (daemons, found.verdict, "other hosts reach" in found.found) == ([], BAD, True)
