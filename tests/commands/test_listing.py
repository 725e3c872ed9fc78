"""`xdm-ft ls methods`."""

import re

from xdm_ft.cli.ls import listing


def test_methods_say_what_they_work_on():
    rows = {cells[0]: cells for line in listing("methods").text().splitlines() for cells in [re.split(r"  +", line)]}
    works_on = {name: cells[2] for name, cells in rows.items()}
    assert works_on["groupdro"] == works_on["…+sagm"] == "cached / end to end"
    assert works_on["coral"] == "end to end" and works_on["linear_probe"] == "cached"
    assert "eta=0.01" in rows["groupdro"][3] and "penalty_weight=100.0" in rows["irm"][3]


def test_heads_that_hold_training_images_are_marked():
    marked = {entry.name: entry.holds for entry in listing("methods").document if entry.holds}
    assert marked == {
        "knn": "its head holds the features of all training images",
        "prototypes": "its head holds the mean feature of each class",
    }
    [line] = [line for line in listing("methods").text().splitlines() if line.startswith("knn ")]
    assert "cached; its head holds the features of all training images" in line
