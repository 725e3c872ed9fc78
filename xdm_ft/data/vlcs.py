"""VLCS: photographs from four older data sets."""

from xdm_ft.image_files.domainbed import BenchmarkFolders


class Vlcs(BenchmarkFolders):
    """10,729 photographs of 5 classes from 4 data sets (Fang et al. 2013), under `VLCS/<domain>/<class>/`,
    or as JigenDG and Dassl pass it on: `VLCS/<DOMAIN>/<full|test>/<0 to 4>/`, with train and crossval too.

    Counts: those of DomainBed's download. Their sum is the 10,729 of Gulrajani & Lopez-Paz 2021.
    """

    folder_names = ("VLCS",)
    domain_folders = {
        "Caltech101": ("Caltech",),
        "LabelMe": (),
        "SUN09": ("SUN",),
        "VOC2007": ("Pascal", "VOC", "PascalVOC", "PascalVOC2007"),
    }
    numbered_classes = ("bird", "car", "chair", "dog", "person")
    published = {"the published VLCS, 10,729 images": (1415, 2656, 3282, 3376)}
