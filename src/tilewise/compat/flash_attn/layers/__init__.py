"""The layers of the flash_attn package that models import by name."""
