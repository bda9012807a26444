"""What reads machine code for registers that nothing wrote."""

from registers import unwritten

RIGHT = """
        /*0000*/                   UMOV UR4, 0x400 ;
        /*0010*/                   ULDC.64 UR6, c[0x0][0x208] ;
        /*0020*/              @!P0 R2UR UR8, R2 ;
        /*0030*/                   UIADD3 UR10, UP0, UR4, 0x40, URZ ;
        /*0040*/                   UIADD3.64 UR12, UR6, 0x2, URZ ;
        /*0050*/                   R2UR P1, UR14, R3 ;
        /*0060*/                   UMOV UR15, 0x40000040 ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], R24 ;
        /*0080*/                   HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR12].tnspB, R24, gsb0 ;
        /*0090*/               @P1 BRA 0x30 ;
        /*00a0*/                   BRA 0xc0 ;
        /*00b0*/                   UIADD3 UR2, UR3, 0x1, URZ ;
        /*00c0*/                   EXIT ;
"""


def test_registers_that_were_written_are_no_fault():
    """Also under a predicate, as one of two, or by an instruction that is never reached."""
    assert unwritten(RIGHT) == []


def test_a_register_that_nothing_wrote_is_found():
    assert unwritten(RIGHT.replace("UMOV UR15", "UMOV UR16")) == [
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], R24",
        "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR12].tnspB, R24, gsb0",
    ]
    assert unwritten(RIGHT.replace("BRA 0xc0", "BRA 0xb0")) == ["UIADD3 UR2, UR3, 0x1, URZ"]
    assert unwritten(RIGHT.replace("UIADD3 UR10, UP0, UR4", "UIADD3 UR10, UP0, UR9")) == [
        "UIADD3 UR10, UP0, UR9, 0x40, URZ"
    ]


def test_what_a_loop_writes_later_counts():
    """A read that a branch comes back to may follow the write."""
    later = RIGHT.replace("UIADD3 UR10, UP0, UR4", "UIADD3 UR10, UP0, UR15")
    assert unwritten(later) == []
