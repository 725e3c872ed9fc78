"""Terra Incognita: wild animals before four camera traps."""

from xdm_ft.data.loading.benchmarks import BenchmarkFolders


class TerraIncognita(BenchmarkFolders):
    """10 classes from 4 camera traps (Beery et al. 2018), under `terra_incognita/<location>/<class>/`.

    Counts: DomainBed's script has made 24,330 images since its source changed, 24,788 before; papers quote the latter,
    per location as in https://github.com/khanrc/miro/issues/9.
    """

    folder_names = ("terra_incognita",)
    # in the order of the names as text, which is DomainBed's
    domain_folders = {
        "location_100": ("L100", "100"),
        "location_38": ("L38", "38"),
        "location_43": ("L43", "43"),
        "location_46": ("L46", "46"),
    }
    published = {
        "Terra Incognita as DomainBed downloads it, 24,330 images": (4741, 9736, 3970, 5883),
        "Terra Incognita as DomainBed's paper has it, 24,788 images": (4879, 9767, 4020, 6122),
    }
