"""Settings, tokens and certificates on the disk: what is refused before anything listens, and what is read again."""

from __future__ import annotations

import datetime
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from controlplane.core.access import Principal, Role
from controlplane.rpc.addresses import is_loopback, split_address
from controlplane.rpc.security import TlsSettings, check_listen
from controlplane.rpc.security.authority import issue, open_authority
from controlplane.rpc.security.certificates import reread_pems
from controlplane.rpc.security.files import Reread
from controlplane.rpc.security.tokens import MAX_TOKENS, Tokens, add_token, hash_of, new_token, read_token
from tests.support.certificates import people

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
HALF = TlsSettings(tokens=Path("t"))
FULL = TlsSettings(ca=Path("a"), cert=Path("c"), key=Path("k"))


# ---- addresses ----


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("localhost:0", "localhost", 0), ("[::1]:7070", "::1", 7070), ("10.0.0.1:65535", "10.0.0.1", 65535)],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", ":7070", "host:", "host:x", "host:65536", "::1:7070", "[::1]", "h:-1"])
def test_what_is_no_address_is_refused_and_never_cut_in_two(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        split_address(text)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "::1"])
def test_loopback_is_known_by_its_address(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "fe80::1"])
def test_everything_else_may_be_reached_by_others(host: str) -> None:
    assert not is_loopback(host)


# ---- listening ----


@pytest.mark.parametrize("listen", ["0.0.0.0:7070", "[::]:7070", "10.0.0.1:0", "somewhere:7070"])
def test_an_address_that_others_reach_needs_tls_or_a_word(listen: str) -> None:
    with pytest.raises(ValueError, match="insecure = true"):
        check_listen(listen, TlsSettings(), insecure=False)
    check_listen(listen, TlsSettings(), insecure=True)
    check_listen(listen, FULL, insecure=False)


def test_loopback_needs_neither_tls_nor_a_word() -> None:
    check_listen("127.0.0.1:0", TlsSettings(), insecure=False)
    check_listen("[::1]:0", TlsSettings(), insecure=False)


def test_tokens_never_go_in_clear_over_a_network_whatever_is_said() -> None:
    for insecure in (False, True):
        with pytest.raises(ValueError, match="needs TLS"):
            check_listen("0.0.0.0:7070", HALF, insecure=insecure)
    check_listen("127.0.0.1:7070", HALF, insecure=False)


@pytest.mark.parametrize("broken", [{"cert": None}, {"key": None}, {"ca": None}])
def test_files_that_do_not_go_together_are_refused(broken: dict[str, None]) -> None:
    with pytest.raises(ValueError, match=r"tls\."):
        replace(FULL, **broken)  # type: ignore[arg-type]


# ---- tokens ----


def test_a_token_is_found_by_what_it_is_and_the_file_does_not_hold_it(tmp_path: Path) -> None:
    file, token, who = tmp_path / "tokens.toml", new_token(), Principal(Role.ROLLOUT, "loop", "run-1")
    add_token(file, Principal(Role.VIEWER, "page"), new_token())
    add_token(file, who, token)
    assert Tokens(file).find(token, NOW) == who
    assert token not in file.read_text()
    assert hash_of(token) in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("shown", ["", "wpt_", "x" * 100_000, "ä"])
def test_what_is_no_token_is_nobodys(tmp_path: Path, shown: str) -> None:
    file = tmp_path / "tokens.toml"
    add_token(file, Principal(Role.ADMIN, "me"), new_token())
    assert Tokens(file).find(shown, NOW) is None


def test_the_hash_of_a_token_is_no_token(tmp_path: Path) -> None:
    file, token = tmp_path / "tokens.toml", new_token()
    add_token(file, Principal(Role.ADMIN, "me"), token)
    assert Tokens(file).find(hash_of(token), NOW) is None


def test_a_token_that_expired_is_nobodys(tmp_path: Path) -> None:
    file, token = tmp_path / "tokens.toml", new_token()
    add_token(file, Principal(Role.ADMIN, "me"), token, NOW + datetime.timedelta(hours=1))
    assert Tokens(file).find(token, NOW) is not None
    assert Tokens(file).find(token, NOW + datetime.timedelta(hours=1)) is None


def test_a_token_that_was_removed_is_nobodys_at_once(tmp_path: Path) -> None:
    file, token = tmp_path / "tokens.toml", new_token()
    add_token(file, Principal(Role.ADMIN, "me"), token)
    tokens = Tokens(file)
    assert tokens.find(token, NOW) is not None
    file.write_text("")
    assert tokens.find(token, NOW) is None


def test_a_file_that_breaks_leaves_what_was_read_in_force_and_says_so_once(tmp_path: Path) -> None:
    file, token = tmp_path / "tokens.toml", new_token()
    add_token(file, Principal(Role.ADMIN, "me"), token)
    tokens = Tokens(file)
    file.write_text("[[token]]\nrole = ")
    with structlog.testing.capture_logs() as logs:
        assert tokens.find(token, NOW) is not None
        assert tokens.find(token, NOW) is not None
    assert [entry["event"] for entry in logs] == ["files_not_reread"]


@pytest.mark.parametrize(
    "text",
    [
        'role = "king"\nname = "a"\nsha256 = "{h}"',
        'role = "admin"\nname = "a b"\nsha256 = "{h}"',
        'role = "admin"\nname = "a"\nsha256 = "short"',
        'role = "admin"\nname = "a"\nsha256 = "{h}"\nexpires = "2026-01-01T00:00:00"',
        'role = "admin"\nname = "a"\nsha256 = "{h}"\nexpires = "soon"',
        'role = "admin"\nname = "a"\ntoken = "wpt_x"',
    ],
)
def test_a_file_that_says_what_it_may_not_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text("[[token]]\n" + text.format(h="0" * 64))
    with pytest.raises(ValueError, match=r"tokens\.toml"):
        Tokens(file)


def test_more_tokens_than_the_limit_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(f'[[token]]\nrole = "admin"\nname = "a"\nsha256 = "{"0" * 64}"\n' * MAX_TOKENS)
    with pytest.raises(ValueError, match="which is the most"):
        add_token(file, Principal(Role.ADMIN, "me"), new_token())


@pytest.mark.parametrize("content", ["", "\n", "two\nlines", "x" * 300, "wpt_\x07", "wpt_ä"])
def test_a_clients_file_holds_one_token_or_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(ValueError, match="holds no token"):
        read_token(tmp_path / "token")


# ---- certificates ----


def test_keys_are_their_owners_alone(tmp_path: Path) -> None:
    who = people(tmp_path)("engine/e0")
    assert who.key is not None
    for key in (who.key, tmp_path / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_an_authority_is_used_again_and_certificates_are_not_overwritten(tmp_path: Path) -> None:
    first = open_authority(tmp_path)
    assert open_authority(tmp_path).cert == first.cert
    people(tmp_path)("viewer/a")
    with pytest.raises(FileExistsError):
        issue(first, Principal(Role.VIEWER, "a"), (), 1, tmp_path, name="viewer-a-any")


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    made = people(tmp_path)
    mixed = replace(made("engine/a"), key=made("engine/b").key)
    with pytest.raises(ValueError, match="the key is not the certificate's"):
        reread_pems(mixed)


@pytest.mark.parametrize("which", ["ca", "cert", "key"])
def test_files_that_are_missing_or_no_pem_are_refused_by_name(tmp_path: Path, which: str) -> None:
    made = people(tmp_path)("engine/a")
    (tmp_path / "junk").write_text("junk")
    for name in ("none", "junk"):
        with pytest.raises(ValueError, match=name):
            reread_pems(replace(made, **{which: tmp_path / name}))  # type: ignore[arg-type]


def test_a_pair_that_was_replaced_is_read_again_and_half_of_it_is_not(tmp_path: Path) -> None:
    made = people(tmp_path)
    a, b = made("engine/a"), made("engine/b")
    assert a.cert is not None
    assert a.key is not None
    assert b.cert is not None
    assert b.key is not None
    pems = reread_pems(a)
    before = pems.get()
    os.replace(b.cert, a.cert)
    assert pems.get() == before, "the key is still the other's"
    os.replace(b.key, a.key)
    assert pems.get() != before
    assert pems.reads == 2


@pytest.mark.parametrize(("days", "level"), [(30, "info"), (3, "warning"), (-1, "warning")])
def test_a_certificates_end_is_told_before_it_comes(tmp_path: Path, days: float, level: str) -> None:
    tls = people(tmp_path).issued(Principal(Role.VIEWER, "a"), days=days)
    with structlog.testing.capture_logs() as logs:
        reread_pems(tls, tell_end=True)
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("certificate_read", level)]


def test_what_holds_a_key_does_not_show_it(tmp_path: Path) -> None:
    assert "PRIVATE" not in repr(reread_pems(people(tmp_path)("engine/a")).get())


def test_a_file_that_is_gone_leaves_what_was_read_in_force(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("one")
    reread = Reread([file], file.read_text)
    file.unlink()
    assert reread.get() == "one"
    file.write_text("other")
    assert reread.get() == "other"
