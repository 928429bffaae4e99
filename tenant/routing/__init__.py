"""Decides which provider receives which request. No module here sends rows."""
