"""DomainNet: 345 classes of objects in six styles."""

from xdm_ft.image_files.domainbed import BenchmarkFolders


class DomainNet(BenchmarkFolders):
    """586,575 images of 345 classes in 6 styles (Peng et al. 2019), under `domain_net/<domain>/<class>/`.

    Counts: the train and test lists of the cleaned version together, from http://ai.bu.edu/M3SDA/ and the catalogue of
    TensorFlow Datasets. Their sum is the 586,575 of Gulrajani & Lopez-Paz 2021. The version before cleaning has about
    596,000 images and is refused.
    """

    folder_names = ("domain_net",)
    domain_folders = {
        "clipart": ("clip",),
        "infograph": ("info",),
        "painting": ("paint",),
        "quickdraw": ("quick",),
        "real": (),
        "sketch": (),
    }
    published = {"DomainNet cleaned, 586,575 images": (48129, 51605, 72266, 172500, 172947, 69128)}
