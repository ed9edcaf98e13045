"""Operations with a backward pass of their own, and compilation."""
