"""`xdm-ft run`, as a script for launchers. Each process that trains notes on which addresses it listens, in a file."""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":
    import psutil

    from xdm_ft.cli.parser import main
    from xdm_ft.experiment import pieces
    from xdm_ft.storage.run_directory import RunDirectory

    do_pieces, in_fork = pieces.do_pieces, RunDirectory.in_fork

    def note(kind: str) -> None:
        found = [one.laddr for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
        Path(f"{kind}-{os.getpid()}.json").write_text(json.dumps([(one.ip, one.port) for one in found]))

    def noting(*given, **settings):
        note(f"rank{os.environ.get('RANK', '')}")
        do_pieces(*given, **settings)
        note(f"trained{os.environ.get('RANK', '')}")

    @contextmanager
    def in_noting_fork(self, number):
        with in_fork(self, number) as own:
            if number:
                note("fork")
            yield own

    pieces.do_pieces, RunDirectory.in_fork = noting, in_noting_fork
    sys.exit(main(["run", *sys.argv[1:]]))
