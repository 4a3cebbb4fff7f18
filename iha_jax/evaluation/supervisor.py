"""Runs one program in a child process and says how it ended; a script of its own, started by `code_execution`.

``python -I supervisor.py`` reads a JSON object from its input: ``source``, ``scratch`` (a directory, made the working
directory) and the limits of `iha_jax.evaluation.code_execution.Limits`. It writes one JSON object: ``outcome``,
``detail``, ``output`` (the start of what the program wrote) and ``containment`` (what was in force).

Three processes: this one watches, counts and kills; its child is the first process of new namespaces where the system
grants them, so that its end is everybody's; that one's child gives up rights and runs the program.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback

_LINUX = sys.platform == "linux"
_LIBC = ctypes.CDLL(None, use_errno=True) if _LINUX else None

# unshare(2)
_NEW_USER, _NEW_PIDS, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
# prctl(2)
_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVILEGES, _CHILD_SUBREAPER = 1, 38, 36
# landlock(7): system calls, and the rights that change a file system, with the version that brought each.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_WRITING = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_POLL_SECONDS = 0.05


def main() -> None:
    """Runs what the input asks for."""
    task = json.load(sys.stdin)
    os.chdir(task["scratch"])
    if _LINUX:
        _prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        _prctl(_CHILD_SUBREAPER, 1)
    containment = _new_namespaces()
    output, report, status = os.pipe(), os.pipe(), os.pipe()
    first = os.fork()
    if first == 0:
        os.close(output[0])
        os.close(report[0])
        os.close(status[0])
        _first_process(task, output[1], report[1], status[1])
    for _, end in (output, report, status):
        os.close(end)
    result = _watch(task, first, output[0], report[0], status[0])
    # The report begins with what the program's process could give up.
    result["containment"] = containment + result["containment"]
    json.dump(result, sys.stdout)


# ---------------------------------------------------------------------------------------------------------- watching


def _watch(task: dict, first: int, output: int, report: int, status: int) -> dict:
    """Follows a program until it or the patience with it ends."""
    deadline = time.monotonic() + task["wall_seconds"]
    written, reported, ended = bytearray(), bytearray(), bytearray()
    pipes = {output: written, report: reported, status: ended}
    limit = task["output_bytes"]
    broken = None
    while pipes and broken is None:
        ready, _, _ = select.select(list(pipes), [], [], _POLL_SECONDS)
        for pipe in ready:
            data = os.read(pipe, 65536)
            pipes[pipe].extend(data)
            if not data:
                del pipes[pipe]
        if len(written) > limit:
            broken = ("too much output", f"wrote more than {limit} bytes")
        elif time.monotonic() > deadline:
            broken = ("timed out", f"still running after {task['wall_seconds']:g} s")
        else:
            broken = _excess(task, first)
        if status not in pipes and broken is None:
            break  # the program has ended, whatever still holds its output
    _kill_all(first)
    for pipe, data in pipes.items():  # what was still under way
        while select.select([pipe], [], [], 0)[0] and (more := os.read(pipe, 65536)):
            data.extend(more)
    lines = reported.decode(errors="replace").splitlines()
    said = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    outcome, detail = broken or _judged(said, ended.decode(), len(written) > limit, limit)
    outside = next((one["path"] for one in said if one.get("what") == "outside"), None)
    if outside is not None:
        outcome, detail = "wrote outside", f"tried to change {outside}"
    return {
        "outcome": outcome,
        "detail": detail,
        "output": bytes(written[:limit]).decode(errors="replace"),
        "containment": next((one["in_force"] for one in said if one.get("what") == "start"), []),
    }


def _judged(said: list[dict], ended: str, too_much: bool, limit: int) -> tuple[str, str]:
    """How a program ended that ended by itself."""
    if too_much:
        return "too much output", f"wrote more than {limit} bytes"
    end = next((one for one in said if one.get("what") == "end"), None)
    if end is not None:
        return end["outcome"], end["detail"]
    code = int(ended or -1)
    if code == -signal.SIGXCPU or code == -signal.SIGKILL:
        # The kernel kills without being asked for two reasons: CPU time, and memory of the machine.
        return (
            ("timed out", "out of CPU time") if code == -signal.SIGXCPU else ("out of memory", "killed by the system")
        )
    if code < 0:
        return "failed", f"killed by signal {-code}"
    return "exited", f"ended before the tests did, with status {code}"


def _excess(task: dict, first: int) -> tuple[str, str] | None:
    """What a program has too much of, if anything."""
    size = _size(task["scratch"])
    if size > task["disk_bytes"]:
        return "too much output", f"files of {size} bytes"
    family = _descendants(first) if _LINUX else []
    if len(family) > task["processes"] + 1:  # the first process is ours
        return "too many processes", f"{len(family) - 1} at once"
    memory = sum(map(_private_bytes, family))
    if memory > task["memory_bytes"]:
        return "out of memory", f"{memory} bytes in all"
    return None


def _size(directory: str) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                total += _size(entry.path)
            else:
                # Blocks, for a file with holes takes less than its length.
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def _descendants(first: int) -> list[int]:
    """This process's children and theirs, whoever adopted them."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    family, wanted = [], {os.getpid()}
    while wanted:
        wanted = {pid for pid, parent in parents.items() if parent in wanted}
        family += wanted
    return family


def _private_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * resource.getpagesize()
    return 0


def _kill_all(first: int) -> None:
    """Ends the first process, with it its namespace, and whoever is left of its family."""
    while True:
        family = _descendants(first) if _LINUX else []
        for pid in {first, *family}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(first, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


# -------------------------------------------------------------------------------------------------------- giving up


def _new_namespaces() -> list[str]:
    """Leaves the network, other processes and shared memory behind, as far as the system lets an ordinary user."""
    if _LIBC is None:
        return []
    user, group = os.getuid(), os.getgid()
    wishes = (
        (_NEW_PIDS | _NEW_NETWORK | _NEW_IPC, ["no network", "own process numbers"]),
        (_NEW_NETWORK, ["no network"]),
    )
    for flags, names in wishes:
        if _LIBC.unshare(_NEW_USER | flags) == 0:
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
            return names
    return []


def _first_process(task: dict, output: int, report: int, status: int) -> None:
    """Starts the program's process, adopts what it leaves behind, and ends when it ends."""
    os.setsid()
    if _LINUX:
        _prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    program = os.fork()
    if program == 0:
        os.close(status)
        try:
            _program(task, output, report)
        finally:
            os._exit(70)
    os.close(output)
    os.close(report)
    while True:
        pid, code = os.waitpid(-1, 0)
        if pid == program:
            os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
            os._exit(0)


def _limit(task: dict) -> None:
    """Limits that the kernel keeps for each process."""
    seconds = task["cpu_seconds"]
    limits = {
        "RLIMIT_CPU": seconds,
        "RLIMIT_AS": task["memory_bytes"],
        "RLIMIT_FSIZE": task["file_bytes"],
        "RLIMIT_NPROC": task["processes"],
        "RLIMIT_NOFILE": 256,
        "RLIMIT_CORE": 0,
    }
    for name, value in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            with contextlib.suppress(ValueError, OSError):  # a harder limit is in force already, or there is none
                resource.setrlimit(kind, (value, value + (1 if name == "RLIMIT_CPU" else 0)))


def _only_write_in(directory: str) -> list[str]:
    """Has the kernel refuse changes of files anywhere else, and connections; the version decides how much."""
    if _LIBC is None or _prctl(_NO_NEW_PRIVILEGES, 1) != 0:
        return []
    version = _LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:
        return []
    writing = _WRITING | (1 << 13 if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    network = 3 if version >= 4 else 0  # binding and connecting of TCP
    scope = 3 if version >= 6 else 0  # abstract sockets of, and signals to, processes outside
    attributes = struct.pack("=QQQ", writing, network, scope)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    if ruleset < 0:
        return []
    for path, rights in ((directory, writing), ("/dev/null", _WRITE_FILE | (writing & _TRUNCATE))):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, opened)
        if _LIBC.syscall(_ADD_RULE, ruleset, 1, rule, ctypes.c_uint(0)) != 0:
            return []
        os.close(opened)
    if _LIBC.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint(0)) != 0:
        return []
    os.close(ruleset)
    return ["writes refused by the kernel", *(["no TCP"] if network else [])]


def _prctl(option: int, value: int) -> int:
    assert _LIBC is not None
    zero = ctypes.c_ulong(0)
    return _LIBC.prctl(option, ctypes.c_ulong(value), zero, zero, zero)


# ------------------------------------------------------------------------------------------------------- the program


def _program(task: dict, output: int, report: int) -> None:
    """Becomes the program; never returns."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    scratch = os.path.realpath(task["scratch"])
    # The report moves out of the way of small numbers that programs close.
    channel = os.dup(report)
    for number in range(3, channel):
        with contextlib.suppress(OSError):
            os.close(number)
    os.environ.clear()
    os.environ.update(TMPDIR=scratch, HOME=scratch)
    sys.dont_write_bytecode = True
    sys.argv = ["program.py"]
    # For as long as the process lives.
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115

    def tell(what: str, **more: object) -> None:
        os.write(channel, (json.dumps({"what": what, **more}) + "\n").encode())

    with open("program.py", "w", encoding="utf-8") as file:
        file.write(task["source"])
    in_force = _only_write_in(scratch)
    _limit(task)
    tell("start", in_force=in_force)
    _report_changes_outside(scratch, tell)
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    ending, pid = ("passed", ""), os.getpid()
    try:
        exec(compile(task["source"], "program.py", "exec"), module.__dict__)
    except SystemExit as error:
        ending = ("exited", f"asked to exit, with {error.code!r}")
    except MemoryError:
        ending = ("out of memory", f"a process needed more than {task['memory_bytes']} bytes")
    except BaseException as error:
        ending = _ending(error, task)
    if os.getpid() != pid:
        os._exit(0)  # a child that the program forked and that came back here
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    tell("end", outcome=ending[0], detail=ending[1])
    os._exit(0)


def _ending(error: BaseException, task: dict) -> tuple[str, str]:
    """What an exception that nobody caught says of the limits."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EFBIG:
        return "too much output", f"a file of more than {task['file_bytes']} bytes"
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "start new thread" in str(error)):
        return "too many processes", f"more than {task['processes']} at once"
    return _failed(error)


def _failed(error: BaseException) -> tuple[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f.lineno for f in reversed(frames) if f.filename == "program.py"), None)
    try:
        text = f"{type(error).__name__}: {error}"[:500]
    except Exception:  # an exception that can't be shown
        text = type(error).__name__
    return "failed", text if line is None else f"line {line}: {text}"


# Audit event → (argument that is a path, argument that is the directory it is relative to) of each path it changes.
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "sqlite3.connect": ((0, None),),
}


def _report_changes_outside(scratch: str, tell) -> None:
    """Names attempts to change files elsewhere, and refuses them where Python makes them; the kernel does the rest."""
    changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def outside(path: object, directory: object) -> str | None:
        """Where a path leads, unless that is a place to write."""
        if isinstance(path, int) or path is None or path in (":memory:", b":memory:", ""):
            return None
        try:
            base = os.readlink(f"/proc/self/fd/{directory}") if isinstance(directory, int) and directory >= 0 else ""
            found = os.path.realpath(os.path.join(base, os.fsdecode(path)))  # type: ignore[arg-type]
        except (TypeError, ValueError, OSError):
            return None  # whatever it is, opening it will fail
        return None if found in (os.devnull, scratch) or found.startswith(scratch + os.sep) else found

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            places = [(path, None)] if (flags or 0) & changing else []
        else:
            places = [(arguments[i], None if j is None else arguments[j]) for i, j in _CHANGES.get(event, ())]
        for path, directory in places:
            if (found := outside(path, directory)) is not None:
                tell("outside", path=found[:500])
                raise PermissionError(13, "outside the scratch directory", found)

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
