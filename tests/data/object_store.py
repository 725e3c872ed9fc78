"""A bucket of the S3 protocol on this machine: moto's server, which s3fs reads as it reads the real one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock
from urllib import request

NAMES = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")


class Bucket:
    """A bucket, at the address `s3://images`."""

    address = "s3://images"

    def __init__(self, endpoint: str) -> None:
        import boto3

        self._client = boto3.client("s3", endpoint_url=endpoint)
        request.urlopen(request.Request(f"{endpoint}/moto-api/reset", method="POST"))  # all servers share their buckets
        self._client.create_bucket(Bucket="images")

    def upload(self, folder: Path) -> None:
        """Uploads all files below a folder."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self._client.upload_file(str(path), "images", str(path.relative_to(folder)))


@contextmanager
def object_store() -> Iterator[Bucket]:
    """Yields an empty bucket."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    try:
        with mock.patch.dict(os.environ, dict(zip(NAMES, (endpoint, "testing", "testing", "us-east-1"), strict=True))):
            S3FileSystem.clear_instance_cache()  # those that know another endpoint
            yield Bucket(endpoint)
    finally:
        S3FileSystem.clear_instance_cache()
        running.stop()
