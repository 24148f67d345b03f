"""What a pair of engines, one for prefills and one for decoding, needs beside a store and a lookup (ADR 35)."""
