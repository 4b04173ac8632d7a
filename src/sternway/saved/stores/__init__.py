"""Where saved tensors go while they are off the device.

_store     what every store does
_host      the host's memory
_disk      files, in a folder (_folder) that disappears with its process
_pool      reusable, page-locked host buffers
_copies    copies between device and host, and tickets for those under way
"""
