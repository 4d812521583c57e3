"""The command."""

import sys
from pathlib import Path

from tools.deployment import check

ROOT = Path(__file__).parents[2]

findings = check(ROOT)
for finding in findings:
    print(finding)
print(f"deployment: {len(findings) or 'no'} faults")
sys.exit(1 if findings else 0)
