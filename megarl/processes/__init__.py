"""Worker processes beside a rank for user code, which may hang, crash, or be killed. Imports `config/` only."""
