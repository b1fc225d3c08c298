"""The administration: ``/admin/v1`` and the description of every path."""
