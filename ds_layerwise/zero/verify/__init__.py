"""The first step beside a plain one."""
