"""PACS: photographs, art, cartoons and sketches."""

from xdm_ft.image_files.domainbed import BenchmarkFolders


class Pacs(BenchmarkFolders):
    """9,991 images of 7 classes in 4 styles (Li et al. 2017), under `PACS/<domain>/<class>/`.

    Counts: those of the published data. Their sum is the 9,991 of Gulrajani & Lopez-Paz 2021.
    """

    folder_names = ("PACS", "kfold")
    domain_folders = {
        "art_painting": ("art",),
        "cartoon": (),
        "photo": (),
        "sketch": (),
    }
    published = {"the published PACS, 9,991 images": (2048, 2344, 1670, 3929)}
