"""``verified_pages``: drafts from the pages that held most in the checks before."""
