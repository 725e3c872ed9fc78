"""The verbs of a site, in the current folder with `model` and `site`; with the argument `taken`, what Windows lacks is
taken away before xdm_ft is imported. It is no test of Windows itself."""

import builtins
import csv
import errno
import fcntl
import io
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

TAKEN = len(sys.argv) > 1
# libraries have versions of their own for every system, so they are imported before
LIBRARIES = """
filelock multiprocessing.popen_spawn_posix multiprocessing.sharedctypes numpy open_clip PIL.Image psutil
safetensors.torch scipy.stats timm torch torchvision tqdm
"""
MODULES = "fcntl grp posix pty pwd resource syslog termios tty"
OF_OS = """
fork forkpty geteuid getuid getegid getgid getgroups sched_getaffinity fchmod fchown chown lchown killpg getpgid getpgrp
setsid uname mkfifo pread pwrite sysconf posix_fadvise wait3 wait4 nice getloadavg
O_NOFOLLOW O_DIRECTORY O_CLOEXEC O_NONBLOCK O_SYNC WNOHANG
"""
OF_SIGNAL = """
SIGHUP SIGUSR1 SIGUSR2 SIGCHLD SIGCLD SIGPIPE SIGALRM SIGKILL SIGQUIT pthread_sigmask pthread_kill sigwait
"""


@contextmanager
def StandIn(file: Path, timeout: float = -1) -> Iterator[None]:
    """For filelock's lock, which would look for Windows itself."""
    with open(file, "x", encoding="utf-8"):
        yield
    file.unlink()


def take_away() -> None:
    for name in LIBRARIES.split():
        import_module(name)
    flags = fcntl.fcntl
    import_module("filelock").FileLock = StandIn
    import_module("multiprocessing.synchronize").sys = SimpleNamespace(
        platform=sys.platform, maxsize=sys.maxsize
    )  # its handles are Linux's
    sys.platform = "win32"
    for module in MODULES.split():
        sys.modules[module] = None  # type: ignore[assignment]
    for holder, names in ((os, OF_OS), (signal, OF_SIGNAL)):
        for name in names.split():
            delattr(holder, name)
    os.supports_fd, os.supports_effective_ids, os.supports_dir_fd = set(), set(), set()
    resource_tracker._HAVE_SIGMASK = shutil._use_fd_functions = False  # type: ignore[attr-defined]
    import_module("torch.utils.data._utils.signal_handling").IS_WINDOWS = True
    multiprocessing.set_start_method("spawn", force=True)
    opened, os_open, readlink, scandir, fsync = builtins.open, os.open, os.readlink, os.listdir, os.fsync

    def refuse_proc(path: object) -> None:
        caller = sys._getframe(2).f_globals["__name__"]
        if str(path).startswith("/proc") and not caller.startswith("psutil"):
            raise FileNotFoundError(errno.ENOENT, "Windows has no /proc", path)

    def open_(file, *arguments, **options):
        refuse_proc(file)
        return opened(file, *arguments, **options)

    def open_by_os(path, *arguments, **options):
        refuse_proc(path)
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Windows opens no folder", path)
        return os_open(path, *arguments, **options)

    def sync(handle):
        if flags(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Windows syncs no file that is open for reading")
        fsync(handle)

    def in_use() -> list[str]:
        files = list[str]()
        for number in scandir("/proc/self/fd"):
            try:
                files.append(readlink(f"/proc/self/fd/{number}"))
            except OSError:  # the one of this listing
                continue
        with opened("/proc/self/maps", encoding="utf-8") as maps:
            return [*files, *(line.split(maxsplit=5)[-1].strip() for line in maps)]

    def unless_open(change):
        def changed(*paths, **options):
            used = in_use()
            for path in map(os.path.realpath, paths):
                if any(file == path or file.startswith(f"{path}/") for file in used):
                    raise PermissionError(errno.EACCES, "Windows changes no open file", path)
            if change.__name__ in ("rename", "replace") and os.path.isdir(paths[1]):
                raise PermissionError(errno.EACCES, "Windows replaces no folder", paths[1])
            return change(*paths, **options)

        return changed

    builtins.open, io.open, os.open, os.fsync = open_, open_, open_by_os, sync
    for name in ("unlink", "remove", "rename", "replace", "rmdir"):
        setattr(os, name, unless_open(getattr(os, name)))


if TAKEN:
    take_away()  # in spawned workers too, which import this file


def call(*words: str) -> None:
    from xdm_ft.cli.parser import main

    print("$", *words, flush=True)
    assert main([*words]) == 0, words


def write_from_excel(file: str, rows: list[dict[str, str]]) -> None:
    with open(file, "w", encoding="utf-8-sig", newline="") as stream:  # a BOM, and lines that end in \r\n
        table = csv.DictWriter(stream, [*rows[0]], dialect="excel")
        table.writeheader()
        table.writerows(rows)


def verbs() -> None:
    import numpy as np

    from xdm_ft import load
    from xdm_ft.export.predictor import stream
    from xdm_ft.export.sources import Item
    from xdm_ft.new_site import adapt as driver
    from xdm_ft.training.adaptation import do_no_harm

    images = sorted(map(str, Path("site").glob("*/*.png")))
    assert len(images) > 30
    model = load("model", device="cpu")
    np.save("probabilities.npy", model.predict_proba(images))
    items = [Item(image, image) for image in images]
    logits = [np.concatenate([b.logits for b in stream(model, items, workers=workers)]) for workers in (0, 2)]
    assert np.array_equal(*logits)

    call("predict", "model", "site", "--out", "predictions.csv", "--probabilities", "--distance")
    call("predict", "model", "site/**/*.png", "--group-by", "site/([^/]+)/", "--out", "groups.jsonl")
    shutil.copyfile(images[0], r"scans\a.png")
    write_from_excel("windows.csv", [{"path": r"scans\a.png", "label": Path(images[0]).parent.name}])
    call("predict", "model", "windows.csv")
    call("assess", "model", "site")
    call("label", "model", "site", "--budget", "40", "--out", "to_label.csv", "--sheet", "sheet.html")
    with open("to_label.csv", encoding="utf-8", newline="") as stream_:
        rows = list(csv.DictReader(stream_))
    write_from_excel("labelled.csv", [row | {"label": Path(row["path"]).parent.name} for row in rows])
    call("evaluate", "model", "site", "--json")
    call("evaluate", "model", "labelled.csv", "--images", "site")
    call("evaluate", "model", "site", "--risk", "95%", "--save")
    driver.do_no_harm = lambda *given: do_no_harm(*given)._replace(p=0.0)  # the adapted model is written in any case
    Path("adapted").mkdir()
    call("adapt", "model", "labelled.csv", "--recentre", "--images", "site", "--out", "adapted")
    np.save("adapted.npy", load("adapted", device="cpu").predict_proba(images))


if __name__ == "__main__":
    verbs()
