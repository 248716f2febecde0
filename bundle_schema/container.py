"""The bundle's bytes: write with `BundleWriter`, change with `rewrite_members`, read with `open_bundle`."""

from dsc.bundle_schema.bundle_reader import OpenBundle, open_bundle
from dsc.bundle_schema.bundle_writer import BundleWriter, remove_leftovers, rewrite_members, temporary_path
from dsc.bundle_schema.graph_location import relocate_graph
from dsc.bundle_schema.zip_layout import STORED_LOCATION, external_location

__all__ = [
    "STORED_LOCATION",
    "BundleWriter",
    "OpenBundle",
    "external_location",
    "open_bundle",
    "relocate_graph",
    "remove_leftovers",
    "rewrite_members",
    "temporary_path",
]
