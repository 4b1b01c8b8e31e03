"""The doctor: says what works here, and for what doesn't how to mend it, without heavy imports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsm_trainer.cli import doctor
from fsm_trainer.cli.doctor import Check, Status


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    return doctor.diagnose()


def test_every_finding_that_is_not_ok_has_a_remedy(checks: list[Check]) -> None:
    names = [check.name for check in checks]
    assert len(names) == len(set(names))
    assert {"python", "torch", "sglang", "cores", "memory", "disk", "rendezvous"} <= set(names)
    for check in checks:
        assert check.detail
        assert bool(check.remedy) == (check.status is not Status.OK), check


def test_the_rendezvous_answers_here(checks: list[Check]) -> None:
    (found,) = (check for check in checks if check.name == "rendezvous")
    assert found.status is Status.OK, found


def test_the_doctor_itself_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fsm_trainer.cli.doctor import diagnose; diagnose();"
        "print({'torch', 'ray', 'transformers', 'deepspeed', 'sglang'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


def test_a_package_that_is_not_installed_is_missing_with_its_remedy() -> None:
    assert doctor.check_package("no-such-distribution", "do this") == Check(
        "no-such-distribution", Status.MISSING, "not installed", "do this"
    )
    assert doctor.check_package("pydantic", "").status is Status.OK


@pytest.mark.parametrize(
    ("cuda", "gpus", "status"),
    [(None, 0, Status.OK), ("13.0", 2, Status.OK), (None, 2, Status.PROBLEM)],
)
def test_gpus_want_a_torch_for_cuda(cuda: str | None, gpus: int, status: Status) -> None:
    assert doctor.check_accelerator(cuda, gpus).status is status


def test_torch_built_for_cuda_is_told_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()

    class Spec:
        origin = str(package / "__init__.py")

    monkeypatch.setattr(doctor, "find_spec", lambda _: Spec)
    for line, cuda in (
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.9'", "12.9"),
        ("cuda: Optional[str] = None", None),
    ):
        (package / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip = 'no'\n")
        assert doctor._torch_cuda() == cuda


def test_too_little_is_a_problem_that_names_both_numbers() -> None:
    found = doctor.check_least("cores", 1, 2, "more")
    assert (found.status, found.detail) == (Status.PROBLEM, "1, at least 2 are needed")
    assert doctor.check_least("cores", 2, 2, "more").status is Status.OK


def test_only_an_old_lock_of_an_extension_is_stale(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    now = time.time()
    assert doctor.check_extension_locks(tmp_path, now).status is Status.OK
    os.utime(lock, (now - 3600, now - 3600))
    found = doctor.check_extension_locks(tmp_path, now)
    assert found.status is Status.PROBLEM
    assert str(lock) in found.detail
    assert doctor.check_extension_locks(tmp_path / "none", now).status is Status.OK


def test_a_host_name_that_does_not_resolve_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("Name or service not known")

    assert doctor.check_host_name("localhost").status is Status.OK
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = doctor.check_host_name("node-7")
    assert found.status is Status.PROBLEM
    assert "node-7" in found.detail and "/etc/hosts" in found.remedy


def test_a_rendezvous_that_never_answers_ends_at_the_deadline() -> None:
    began = time.monotonic()
    found = doctor.check_rendezvous("import time; time.sleep(60)", timeout=0.5)
    assert (found.status, found.detail) == (Status.PROBLEM, "no answer within 0.5 s")
    assert time.monotonic() - began < 10


def test_a_rendezvous_that_fails_says_why() -> None:
    found = doctor.check_rendezvous("raise OSError('no way')", timeout=20)
    assert found.status is Status.PROBLEM
    assert found.detail.endswith("OSError: no way")
