"""The bundle's bytes: write with `BundleWriter`, change with `rewrite_members`, read with `open_bundle`."""

from dsc.bundle_schema.bundle_reader import OpenBundle, open_bundle
from dsc.bundle_schema.bundle_writer import BundleWriter, remove_leftovers, rewrite_members, temporary_path
from dsc.bundle_schema.graph_location import relocate_graph
from dsc.bundle_schema.weight_index import INDEX_NAME, StoredTensor
from dsc.bundle_schema.zip_layout import STORED_LOCATION, WEIGHTS_NAME, external_location

__all__ = [
    "INDEX_NAME",
    "STORED_LOCATION",
    "WEIGHTS_NAME",
    "BundleWriter",
    "OpenBundle",
    "StoredTensor",
    "external_location",
    "open_bundle",
    "relocate_graph",
    "remove_leftovers",
    "rewrite_members",
    "temporary_path",
]
