"""The method: pure tensor functions for coupled sampling."""
