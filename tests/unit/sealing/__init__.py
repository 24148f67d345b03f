"""Tests of kvtier/sealing."""
