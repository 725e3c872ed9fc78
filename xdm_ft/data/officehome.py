"""Office-Home: objects of offices and homes as art, clip art, product pictures and photographs."""

from xdm_ft.image_files.domainbed import BenchmarkFolders


class OfficeHome(BenchmarkFolders):
    """15,588 images of 65 classes in 4 styles (Venkateswara et al. 2017), under `office_home/<domain>/<class>/`.

    Office-Home-DG of Dassl has `<domain>/<train|val>/<class>/`. Counts: those of the published data. Their sum is the
    15,588 of Gulrajani & Lopez-Paz 2021.
    """

    folder_names = ("office_home", "OfficeHomeDataset", "OfficeHomeDataset_10072016", "office_home_dg")
    domain_folders = {
        "Art": (),
        "Clipart": (),
        "Product": (),
        "Real World": ("Real",),
    }
    published = {"the published Office-Home, 15,588 images": (2427, 4365, 4439, 4357)}
