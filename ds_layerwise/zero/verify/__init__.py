"""The check of the first step against a plain one."""
