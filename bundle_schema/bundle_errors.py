"""One error class for each way in which a bundle file can be wrong."""

# ruff: noqa: N818 - the classes name the finding, like `DuplicateMember`

from __future__ import annotations

from dsc.bundle_schema.errors import BundleError, HostError


class NotABundle(BundleError):
    """The file does not begin as a ZIP file does, or it is empty."""


class TruncatedBundle(BundleError):
    """The end of the file is missing: an interrupted copy or download."""


class ExtraBytes(BundleError):
    """There are bytes before, between or after what the format allows: trailing data, comments, holes."""


class OversizedDirectory(BundleError):
    """The ZIP directory is larger than any bundle needs."""


class BadMemberName(BundleError):
    """A member's name is absolute, climbs out with ``..``, or has characters outside ``A-Za-z0-9._-/``."""


class DuplicateMember(BundleError):
    """Two members have one name."""


class CaseTwinMember(BundleError):
    """Two members' names differ in case only, so they are one file on some systems."""


class SpecialMember(BundleError):
    """A member is a symbolic link, a folder or a device instead of a plain file."""


class EncryptedMember(BundleError):
    """A member is encrypted."""


class CompressedMember(BundleError):
    """A member is compressed; members are stored so that they can be memory-mapped."""


class OverlappingMembers(BundleError):
    """Two members share bytes, or a member lies outside its region."""


class HeaderMismatch(BundleError):
    """A local header contradicts the ZIP directory."""


class MisalignedMember(BundleError):
    """A payload does not start at a multiple of its alignment."""


class MissingMember(BundleError):
    """A member that is required or asked for is not in the bundle."""


class UnlistedMember(BundleError):
    """A member is in the file but not in the manifest."""


class MemberMismatch(BundleError):
    """Offset or size of a member in the manifest contradict the ZIP directory."""


class ChecksumMismatch(BundleError):
    """A member's bytes are not those that were written."""


class BadWeightIndex(BundleError):
    """The index of the weights is malformed, or its tensors do not fill the member that holds their bytes."""


class ForeignLocation(BundleError):
    """A graph names a file other than the bundle itself for its weights."""


class OversizedJson(BundleError):
    """A JSON member has more bytes or more values than the format allows."""


class MalformedJson(BundleError):
    """A JSON member is not valid JSON, is nested too deeply, or has a number that is not finite."""


class DuplicateKey(BundleError):
    """A JSON object has one key twice."""


class InvalidField(BundleError):
    """A field of a JSON member is missing, unknown, of the wrong type, out of range or inconsistent."""


class UnsupportedSchema(BundleError):
    """The member was written with another major version of its schema."""


class DiskFull(HostError):
    """There is no room left (or a quota is reached) where the bundle is being written."""
