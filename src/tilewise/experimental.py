"""Gone: the experiment is answered, and its code is a study."""

raise ImportError("tilewise.experimental is gone; import studies.accumulation from a checkout of tilewise")
