"""What is computed from predictions, labels and features: functions of arrays."""
