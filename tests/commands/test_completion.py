"""What the Tab key offers: for real in bash, in less than a second, and all keys that the recipes' classes have."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(sys.executable).parent
COMPLETE = """
eval "$(register-python-argcomplete xdm-ft)"
complete -p xdm-ft >/dev/null || exit 9
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9 COMP_KEY=9
read -ra COMP_WORDS <<<"$1"
[[ "$1" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete xdm-ft "${COMP_WORDS[COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offered(line: str, folder: Path) -> list[str]:
    """What bash offers after a line, for the command that argcomplete has registered."""
    command = folder / "bin" / "xdm-ft"
    if not command.exists():  # as pip would install it, for this tree
        command.parent.mkdir()
        start = "import sys; from xdm_ft.__main__ import main; sys.exit(main())"
        command.write_text(f"#!{sys.executable}\n{start}\n")
        command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), str(PROGRAMS), os.environ["PATH"]])
    there = os.environ | {"PATH": path, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(["bash", "-c", COMPLETE, "bash", line], cwd=folder, env=there, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def bash(tmp_path):
    if shutil.which("bash") is None or not (PROGRAMS / "register-python-argcomplete").exists():
        pytest.skip("needs bash, and argcomplete beside this Python")
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    (tmp_path / "notes.txt").write_text("")
    runs = [
        {"method": "erm", "test_domains": ["ink", "chalk"], "seed": 3, "trial": 0, "status": "ok"},
        {"method": "xdomainmix+sam", "test_domains": ["ink"], "seed": 4, "trial": 2, "status": "ok"},
        {"method": "mixup", "test_domains": ["ink"], "seed": 0, "trial": 0, "status": "failed"},
    ]
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "results.json").write_text(json.dumps({"runs": runs}))
    return lambda line: offered(line, tmp_path)


@pytest.mark.slow
def test_bash_completes(bash):
    assert bash("xdm-ft va") == ["validate"]
    assert {"clip_folder", "clip_pacs"} <= {*bash("xdm-ft run clip_")}
    assert bash("xdm-ft run mi") == ["mine.yaml"] and "notes.txt" not in bash("xdm-ft doctor ")
    assert bash("xdm-ft run demo training.steps=3 --qu") == ["--quiet"]
    assert sorted(bash("xdm-ft run demo --json training.lo")) == ["training.loss_average="]
    assert "xdomainmix.warmup_steps=" in bash("xdm-ft run demo xdomainmix.w")
    assert "erm" in bash("xdm-ft retrain done ") and "mixup" not in bash("xdm-ft retrain done ")
    assert bash("xdm-ft retrain done xdomainmix+sam i") == ["ink"]
    assert "4" in bash("xdm-ft retrain done xdomainmix+sam ink ")
    assert {"ls", "verify", "prune"} <= {*bash("xdm-ft cache ")}


def test_an_answer_takes_less_than_a_second(bash):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert bash("xdm-ft run demo training.lr") == ["training.lr="]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # not the clock: other processes may want the cores too
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
