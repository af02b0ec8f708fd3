"""Keeps one node installed: library, preload file, cache folders. Standard library only: it idles on all."""
