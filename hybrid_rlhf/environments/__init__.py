"""What a model acts in: someone else's classes and functions, what they are asked, and what they answer."""
